"""Source of a rank's weights: its own disk, the Hugging Face hub, or the engine's machine. Does not import mlx."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from tandem.checkpoints.demo import fetch_demo
from tandem.checkpoints.files import METADATA, ModelFiles, read_headers, weight_files
from tandem.checkpoints.resolve import download_files, hub_model
from tandem.checkpoints.stored import demo_path, path_here
from tandem.errors import RankFailure, TransportError
from tandem.models.description import describe
from tandem.models.slice_cache import fetch_files, fetch_slice, read_ranges
from tandem.models.slices import owned_files
from tandem.protocol.adapters import LoadAdapter
from tandem.protocol.blob_messages import Range
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.layout import StageSpec
from tandem.protocol.pictures import EncodePicture
from tandem.transport.blobs import PATIENCE_S, BlobClient, BlobServer


class Head(Struct, frozen=True):
    """Endpoint and keys of the engine's machine, which serves its copy of the model."""

    endpoint: str
    keys: ClusterKeys


def serve_model(directory: Path, keys: ClusterKeys, host: str) -> BlobServer:
    """Serve config, tokenizer and weights of a model directory to clients with `keys`. Raises `BrokenModel`."""
    whole = [path for pattern in METADATA for path in directory.glob(pattern) if path.is_file() and not path.name.startswith(".")]
    return BlobServer({*whole, *weight_files(directory)}, keys, host)


def serve_adapter(order: LoadAdapter, servers: dict[int, BlobServer], keys: ClusterKeys, host: str) -> str:
    """Serve the files of the adapter that is to be loaded to clients with `keys`; return the endpoint, empty for an unload.

    `servers`: those of loaded adapters, by index.
    """
    index, directory = order.adapter.index, Path(order.adapter.path)
    if (old := servers.pop(index, None)) is not None:
        old.close()
    if order.unload:
        return ""
    servers[index] = BlobServer([*directory.glob("adapter*.json"), *directory.glob("adapter*.safetensors")], keys, host)
    return servers[index].endpoint


def obtain_adapter(order: LoadAdapter, keys: ClusterKeys) -> LoadAdapter:
    """Fetch the adapter's files from the engine's machine; return the order with their directory. Raises UsageError and
    TransportError."""
    with closing(BlobClient(order.weights_endpoint, keys)) as client:
        return replace(order, directory=str(fetch_files(client, "adapters")))


def obtain_inputs(order: EncodePicture, keys: ClusterKeys) -> EncodePicture:
    """Fetch a picture's inputs from the engine's machine; return the order with them. Raises TransportError."""
    with closing(BlobClient(order.endpoint, keys)) as client:
        [inputs] = read_ranges(client, [Range(order.key, 0, order.size)])
    return replace(order, inputs=inputs)


def obtain_files(
    spec: StageSpec,
    head: Head | None,
    progress: Callable[[int, int], None],
    *,
    accept: Callable[[ModelFiles], None] = lambda files: None,
    patience_s: float = PATIENCE_S,
) -> ModelFiles:
    """Make the files of `spec`'s layers available on this machine, and return them.

    With `head` they are fetched from there, and `spec.model_path` is ignored. The demo model is downloaded if missing.
    `accept` is called once headers are present, before weights are transferred, and may raise. `progress` is called with
    (bytes present, total bytes). Raises RankFailure after `patience_s` seconds of silence of the head, and UsageError.
    """
    layers, mtp = range(*spec.layers), spec.has_head and spec.samples
    if head is not None:
        with closing(BlobClient(head.endpoint, head.keys, patience_s=patience_s)) as client:
            try:
                return fetch_slice(client, spec.model_name, layers, progress, mtp=mtp, vision=spec.vision, accept=accept)
            except TransportError as error:
                raise RankFailure(f"{spec.label}: {error.message}", rank=spec.rank) from error
    if spec.hub:
        files = hub_model(spec.hub)
        accept(files)
        description = describe(files, vision=spec.vision)
        return download_files(files, owned_files(read_headers(files), layers, description, mtp=mtp), progress)
    path = path_here(spec.model_path, spec.home)
    if path == demo_path():
        fetch_demo(progress)
    return ModelFiles(path=path, name=spec.model_name)
