"""Resolution of model names: a local directory, a GGUF file, the demo model, or a hub repository."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from tandem.checkpoints.catalogue import Chosen, catalogue, choose, closest, find
from tandem.checkpoints.demo import fetch_demo
from tandem.checkpoints.files import METADATA, WEIGHTS, ModelFiles, Progress
from tandem.checkpoints.stored import DEMO, demo_path, used
from tandem.config.settings import SchedulerSettings
from tandem.env import cache_dir
from tandem.errors import ModelNotFound, UsageError
from tandem.processes.device import this_device
from tandem.system.files import file_trouble

HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+\Z")


def resolve(model: str, *, revision: str | None = None, progress: Progress | None = None, weights: bool = True) -> ModelFiles:
    """Make `model` available as a local directory; return its files.

    `model` is a directory, a .gguf file (converted once into the cache directory), `demo`, a hub id (org/name,
    downloaded into the hub's own cache), or a name for one (`known`). `revision` applies only to hub ids. Without
    `weights` only the headers of a hub model's weights are downloaded (see `ModelFiles.headers`). Raise
    `ModelNotFound`, and the errors of the GGUF conversion.
    """
    if not model:
        raise UsageError("no model is given: name a directory, a GGUF file, a hub id (org/name) or demo", param="model")
    if revision is not None and (model == "demo" or Path(model).expanduser().exists()):
        raise UsageError(f"--revision {revision} is for hub models; {model} is local", param="revision")
    if model == "demo":
        return _demo()
    path = Path(model).expanduser()
    try:
        is_directory, is_file = path.is_dir(), path.is_file()
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {file_trouble(error)}") from error
    if is_directory:
        return _directory(path)
    if is_file:
        if path.suffix.lower() != ".gguf":
            with path.open("rb") as file:
                if file.read(4) != b"GGUF":  # which Ollama's blobs, without a suffix, are
                    raise ModelNotFound(f"{path}: is a file but not a .gguf; name the directory that holds it")
        from tandem.checkpoints.gguf.convert import convert_cached  # imports numpy, which few processes need

        return ModelFiles(convert_cached(path, progress), name_of(model))
    if (chosen := known(model)) is not None:
        model = chosen.id
    if HUB_ID.match(model):
        return _hub_model(model, revision, progress if weights else None, weights=weights)
    raise _unknown(model, path)


def memory_here() -> int:
    """Return the bytes of this machine's memory that a model may use by default."""
    return int(this_device().memory_bytes * SchedulerSettings.memory_fraction)


def known(model: str, room: Callable[[], int] = memory_here, quant: str | None = None) -> Chosen | None:
    """Return the copy that a name of the catalogue stands for; None for `demo`, a path, a hub id or an unknown name.

    The quantisation is `quant`, else the one that ends the name, else it suits the bytes that `room` returns: those that
    the model may use. Raise UsageError for a quantisation without a copy.
    """
    found = find(model) if model != "demo" else None
    if found is None or Path(model).expanduser().exists():
        return None
    return choose(found[0], room(), quant or found[1])


def expect(model: str) -> None:
    """Raise `ModelNotFound` for a name that `resolve` would reject. Nothing is downloaded or converted."""
    path = Path(model).expanduser()
    if model == "demo":
        _demo()
    elif path.is_dir():
        _directory(path)
    elif not path.exists() and not HUB_ID.match(model) and find(model) is None:
        raise _unknown(model, path)


def _unknown(model: str, path: Path) -> ModelNotFound:
    if path.exists():
        return ModelNotFound(f"{model}: is a pipe or a device; name a directory or a GGUF file")
    near = difflib.get_close_matches(model, ["demo", DEMO, *_beside(path)], 1)
    names = ["demo" if name == DEMO else name for name in near] or closest(model)
    meant = f"; did you mean {' or '.join(names)}?" if names else ""
    return ModelNotFound(
        f"{model}: no such directory or file, not a hub id (org/name), and not a name of the catalogue of "
        f"{catalogue().checked}{meant or ';'} `tandem search WORDS` finds models"
    )


def _beside(path: Path) -> list[str]:
    """Return the paths of models beside `path`, in the same notation."""
    try:
        found = [one for one in path.parent.iterdir() if one.suffix == ".gguf" or (one / "config.json").is_file()]
    except OSError:
        return []
    return [str(one) for one in found]


def name_of(model: str) -> str:
    """Return the name of a model without resolving it: `ModelFiles.name` of `resolve`'s result."""
    path = Path(model).expanduser()
    if model == "demo" or not path.exists():
        chosen = known(model)
        return DEMO if model == "demo" else model if chosen is None else chosen.id
    if not path.is_file():
        return path.name or path.resolve().name
    from tandem.checkpoints.gguf.header import model_stem

    return model_stem(path)


def _demo() -> ModelFiles:
    path = demo_path()
    if not (path / "config.json").is_file():
        raise ModelNotFound("the demo model is not on this machine yet: run `tandem model get demo`")
    fetch_demo()  # completes what an earlier version converted
    used(path)
    return ModelFiles(path, DEMO)


def _directory(path: Path) -> ModelFiles:
    try:
        names = {one.name for one in path.iterdir()}
    except OSError as error:
        raise ModelNotFound(f"{path}: cannot be read: {file_trouble(error)}") from error
    if "config.json" not in names:
        raise ModelNotFound(f"{path}: has no config.json, so it is not a model directory")
    resolved = path.resolve()
    if cache_dir().resolve() in resolved.parents:
        used(resolved)
    return ModelFiles(resolved, path.name or resolved.name)


def _hub_model(repo: str, revision: str | None, progress: Progress | None, *, weights: bool) -> ModelFiles:
    # Imported here: most runs use local files.
    from tandem.checkpoints import hub

    path = hub.download(repo, revision, METADATA)
    used(path)
    if weights:
        return ModelFiles(hub.download(repo, path.name, WEIGHTS, progress), repo)
    headers = hub.download_headers(repo, path, WEIGHTS)
    return ModelFiles(path, repo, headers=headers, hub=f"{repo}@{path.name}")


def hub_model(hub: str) -> ModelFiles:
    """Download metadata and headers of a hub model that another machine resolved without weights.

    `hub` is that machine's `ModelFiles.hub` (org/name@commit). Raise `ModelNotFound`.
    """
    repo, _, commit = hub.rpartition("@")
    return _hub_model(repo, commit, None, weights=False)


def download_files(files: ModelFiles, names: Sequence[str], progress: Progress | None = None) -> ModelFiles:
    """Return `files` (from `hub_model`) with the weight files `names`, downloaded unless cached.

    `progress` is called with bytes downloaded and in all. Raise `ModelNotFound`.
    """
    from tandem.checkpoints import hub

    repo, _, commit = files.hub.rpartition("@")
    path = hub.download(repo, commit, names, progress)
    return replace(files, weights=tuple(path / name for name in names))
