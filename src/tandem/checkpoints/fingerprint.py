"""What tells one model from another, whatever it is called."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tandem.checkpoints.index import weight_files

SAMPLES, SAMPLE = 64, 4096
"""So many places of each weight file are looked at, each of so many bytes."""


def fingerprint(*directories: Path) -> str:
    """24 hex digits over config.json and weights of a model, and adapters beside it: sizes, samples, and the times of
    change, as weights may differ in places that no sample is of.

    Reads under 1 MiB of each file. Raises `BrokenModel` for a model without weights, and OSError.
    """
    digest = hashlib.blake2b(digest_size=12)
    for number, directory in enumerate(directories):
        weights = weight_files(directory) if number == 0 else tuple(sorted(directory.glob("*.safetensors")))
        for path in (*sorted(directory.glob("*config.json")), *weights):
            _add(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, path: Path) -> None:
    status = path.stat()
    digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    with path.open("rb") as file:
        for place in range(SAMPLES):
            file.seek(status.st_size * place // SAMPLES)
            digest.update(file.read(SAMPLE))
