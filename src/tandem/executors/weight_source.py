"""Source of a rank's weights: its machine, the hub, or the engine's machine. No mlx."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from tandem.checkpoints.files import METADATA, ModelFiles, read_headers, weight_files
from tandem.checkpoints.resolve import download_files, hub_model
from tandem.errors import RankFailure, TransportError
from tandem.models.description import describe
from tandem.models.slice_cache import fetch_slice
from tandem.models.slices import owned_files
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.layout import StageSpec
from tandem.transport.blobs import PATIENCE_S, BlobClient, BlobServer


class Head(Struct, frozen=True):
    """Address at which the engine's machine serves its copy of the model."""

    endpoint: str
    keys: ClusterKeys


def serve_model(directory: Path, keys: ClusterKeys, host: str) -> BlobServer:
    """Serve config, tokenizer and weights of a model directory to the holders of `keys`. Raises `BrokenModel`."""
    whole = [path for pattern in METADATA for path in directory.glob(pattern) if path.is_file() and not path.name.startswith(".")]
    return BlobServer({*whole, *weight_files(directory)}, keys, host)


def obtain_files(
    spec: StageSpec,
    head: Head | None,
    progress: Callable[[int, int], None],
    *,
    accept: Callable[[ModelFiles], None] = lambda files: None,
    patience_s: float = PATIENCE_S,
) -> ModelFiles:
    """Make the slice of the model that `spec` names available on this machine.

    With `head` it comes from there, and the directory that `spec` names is not looked at. `accept` is called when the
    headers are here, before any weights travel, and may refuse by raising. `progress` gets bytes that are here and
    bytes in all. Raises RankFailure when the head says nothing for `patience_s` seconds, and UsageError.
    """
    layers = range(*spec.layers)
    if head is not None:
        client = BlobClient(head.endpoint, head.keys, patience_s=patience_s)
        try:
            return fetch_slice(client, spec.model_name, layers, progress, accept=accept)
        except TransportError as error:
            raise RankFailure(f"{spec.label}: {error.message}", rank=spec.rank) from error
        finally:
            client.close()
    if spec.hub:
        files = hub_model(spec.hub)
        accept(files)
        return download_files(files, owned_files(read_headers(files), layers, describe(files)), progress)
    return ModelFiles(path=Path(spec.model_path), name=spec.model_name)
