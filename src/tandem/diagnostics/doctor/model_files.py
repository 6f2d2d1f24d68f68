"""State of a machine's copy of a model: presence, completeness, hashes. Downloads nothing."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tandem.checkpoints.files import weight_files
from tandem.checkpoints.resolve import HUB_ID
from tandem.checkpoints.stored import demo_path, path_here
from tandem.diagnostics.doctor.probe_messages import ModelFacts
from tandem.errors import BrokenModel
from tandem.system.files import file_trouble

_SUFFIXES = (".safetensors", ".json", ".jinja", ".model", ".gguf")
SAMPLE = 1 << 20
"""Size of a sample in bytes."""
SAMPLES = 16
"""Number of samples of a large file, the first and last MiB included. They reveal a truncated copy or another quantisation, but
not a single wrong byte (`full_hash`)."""


def is_hub_id(model: str) -> bool:
    """True for `org/name`, unless a file or directory of that name exists here."""
    return bool(HUB_ID.match(model)) and not Path(model).exists()


def look_at(model: str, *, full_hash: bool = False, home: str = "") -> ModelFacts:
    """Return the state of this machine's copy of `model` (directory, GGUF file, hub id or `demo`).

    `home`: home directory of the user who named it (`path_here`).
    """
    try:
        return _look_at(model, home, full_hash=full_hash)
    except OSError as error:
        return ModelFacts(None, f"{error.filename or model} cannot be read: {file_trouble(error)}")


def _look_at(model: str, home: str, *, full_hash: bool) -> ModelFacts:
    path = _find(model, home)
    if path is None or not path.exists():
        return ModelFacts(None, f"{model} is not on this machine")
    if path.is_file():
        return ModelFacts(str(path), digests={path.name: digest(path, full=full_hash)}, bytes=path.stat().st_size)
    if not (path / "config.json").is_file():
        return ModelFacts(str(path), f"{path} has no config.json")
    files = sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES and file.is_file())
    problem = None
    try:
        weight_files(path)
    except BrokenModel as error:
        problem = error.message
    return ModelFacts(
        str(path),
        problem,
        {file.name: digest(file, full=full_hash) for file in files},
        sum(file.stat().st_size for file in files),
    )


def digest(path: Path, *, full: bool = False) -> str:
    """Return a hash of a file's size and content; large files are sampled unless `full`."""
    size = path.stat().st_size
    hasher = hashlib.blake2b(str(size).encode(), digest_size=16)
    with path.open("rb") as file:
        if full or size <= SAMPLE * SAMPLES:
            while block := file.read(SAMPLE):
                hasher.update(block)
        else:
            for index in range(SAMPLES):
                file.seek((size - SAMPLE) * index // (SAMPLES - 1))
                hasher.update(file.read(SAMPLE))
    return hasher.hexdigest()


def _find(model: str, home: str) -> Path | None:
    if model == "demo":
        return demo_path()
    return _hub_copy(model) if is_hub_id(model) else path_here(model, home)


def _hub_copy(repo: str) -> Path | None:
    # Imported here: the import is slow, and most models are directories.
    from huggingface_hub import snapshot_download

    from tandem.checkpoints.hub import HUB_ERRORS

    try:
        return Path(snapshot_download(repo, local_files_only=True))
    except HUB_ERRORS:  # no copy, or an unusable one
        return None
