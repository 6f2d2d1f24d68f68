"""Model directory on this machine, complete or partial: its files, their headers, and its fingerprint. No mlx."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.config import read_json
from tandem.checkpoints.safetensors import TensorInfo, read_header
from tandem.errors import BrokenModel
from tandem.system.files import open_regular

METADATA = ("*.json", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jsonl", "*.jinja")
"""File patterns of a model besides its weights."""
WEIGHTS = ("model*.safetensors",)
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.safetensors$")
SAMPLES, SAMPLE = 64, 4096
"""Samples that a fingerprint reads from each weight file, and bytes of each."""
Progress = Callable[[int, int], None]
"""Callback with bytes done and bytes in all (0 while unknown)."""


def counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes it is called with, and calls `progress` with the sum and `total`."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return add


@dataclass(frozen=True)
class ModelFiles:
    """A model directory (config.json, model*.safetensors, tokenizer.json ...) on this machine."""

    path: Path
    name: str
    """Display name: directory name, GGUF file name without suffix, or hub id."""
    headers: Path | None = None
    """Directory with copies of all weight files' headers, if some weights are not on this machine; else None."""
    weights: tuple[Path, ...] = ()
    """With `headers`: safetensors files on this machine, which hold some of the model's tensors."""
    hub: str = ""
    """With `headers`: repository and commit (org/name@commit) to download the other weights from; empty if not from a
    hub."""


def weight_files(path: Path) -> tuple[Path, ...]:
    """Return the weight files of a model directory. Raise `BrokenModel` naming one that is missing."""
    names = weight_names(path)
    if not names:
        names = sorted(p.name for p in path.glob("model*.safetensors"))
        names = sorted({*names, *(s for n in names for s in _siblings(n))})
    if not names:
        raise BrokenModel(f"{path}: has no model*.safetensors")
    for name in names:
        if not (path / name).is_file():
            raise BrokenModel(f"{path / name}: is missing; download or copy the model again", param=name)
    return tuple(path / name for name in names)


def weight_names(path: Path) -> list[str]:
    """Return the names of the weight files in a model directory's index; empty if there is no index.

    Raise `BrokenModel` for an index without files, or with one outside the directory.
    """
    index = path / "model.safetensors.index.json"
    if not index.exists():
        return []
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise BrokenModel(f"{index}: has no weight_map", param=index.name)
    names = sorted({str(name) for name in weight_map.values()})
    if bad := [name for name in names if Path(name).name != name]:
        raise BrokenModel(f"{index}: names {bad[0]}, which is not a file of this directory", param=index.name)
    return names


def _siblings(name: str) -> list[str]:
    match = _SHARD.match(name)
    if not match:
        return []
    count = int(match[3])
    return [f"{match[1]}-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]


def read_headers(files: ModelFiles) -> dict[str, dict[str, TensorInfo]]:
    """Return all tensors of the model by weight file and name; local weight files are checked. Raise `BrokenModel`."""
    if files.headers is None:
        return {file.name: read_header(file) for file in weight_files(files.path)}
    for file in files.weights:
        read_header(file)
    return {file.name: read_header(file, header_only=True) for file in sorted(files.headers.glob("*.safetensors"))}


def read_tensors(files: ModelFiles) -> dict[str, TensorInfo]:
    """Return all tensors of the model by name; local weight files are checked. Raise `BrokenModel`."""
    return {name: info for header in read_headers(files).values() for name, info in header.items()}


def fingerprint(*directories: Path, model: bool = True) -> str:
    """Return 24 hex digits that identify a model directory's config.json and weights, and further directories (adapters; all with
    `model` False).

    Hashed are sizes, samples, and modification times, since samples do not cover every change. Reads under 1 MiB per
    file. Raise `BrokenModel` for a model without weights, and OSError.
    """
    digest = hashlib.blake2b(digest_size=12)
    for number, directory in enumerate(directories):
        weights = weight_files(directory) if model and number == 0 else tuple(sorted(directory.glob("*.safetensors")))
        for path in (*sorted(directory.glob("*config.json")), *weights):
            _add(digest, path)
    return digest.hexdigest()


def _add(digest: hashlib.blake2b, path: Path) -> None:
    with open_regular(path) as file:
        status = os.fstat(file.fileno())
        digest.update(f"{path.name}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
        for place in range(SAMPLES):
            file.seek(status.st_size * place // SAMPLES)
            digest.update(file.read(SAMPLE))
