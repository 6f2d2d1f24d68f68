"""A model directory that is on this machine, or part of one: its files, their headers, and its fingerprint. No mlx."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.checkpoints.config import read_json
from tandem.checkpoints.safetensors import TensorInfo, read_header
from tandem.errors import BrokenModel

METADATA = ("*.json", "tokenizer.model", "*.tiktoken", "tiktoken.model", "*.txt", "*.jsonl", "*.jinja")
"""Names of a model's files besides its weights."""
WEIGHTS = ("model*.safetensors",)
_SHARD = re.compile(r"^(.*)-(\d{5})-of-(\d{5})\.safetensors$")
SAMPLES, SAMPLE = 64, 4096
"""Spans of each weight file that a fingerprint reads, and bytes of each."""
Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all (0 while unknown)."""


def counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Return a function that adds up the bytes that it is called with, and reports to `progress`."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return add


@dataclass(frozen=True)
class ModelFiles:
    """A model directory (config.json, model*.safetensors, tokenizer.json ...) that is on this machine."""

    path: Path
    name: str
    """Name for people: directory name, GGUF file name without suffix, or hub id."""
    headers: Path | None = None
    """Directory with a copy of the header of every weight file, where not all weights are on this machine."""
    weights: tuple[Path, ...] = ()
    """With `headers`: the safetensors files that are here, which hold some of the model's tensors."""
    hub: str = ""
    """With `headers`: repository and commit (org/name@commit) from which the other weights can be had."""


def weight_files(path: Path) -> tuple[Path, ...]:
    """The weight files of a model directory, all present. Raises `BrokenModel` naming one that is missing."""
    names = weight_names(path)
    if not names:
        names = sorted(p.name for p in path.glob("model*.safetensors"))
        names = sorted({*names, *(s for n in names for s in _siblings(n))})
    if not names:
        raise BrokenModel(f"{path}: has no model*.safetensors", param="model")
    for name in names:
        if not (path / name).is_file():
            raise BrokenModel(f"{path / name}: is missing; download or copy the model again", param=name)
    return tuple(path / name for name in names)


def weight_names(path: Path) -> list[str]:
    """Names of the weight files in the index of a model directory; empty where there is no index.

    Raises `BrokenModel` for an index that names none, or one outside the directory.
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
    """All tensors of the model by name of the weight file; checks the files that are here. Raises `BrokenModel`."""
    if files.headers is None:
        return {file.name: read_header(file) for file in weight_files(files.path)}
    for file in files.weights:
        read_header(file)
    return {file.name: read_header(file, header_only=True) for file in sorted(files.headers.glob("*.safetensors"))}


def read_tensors(files: ModelFiles) -> dict[str, TensorInfo]:
    """All tensors of the model by their names; checks the files that are here. Raises `BrokenModel`."""
    return {name: info for header in read_headers(files).values() for name, info in header.items()}


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
