"""Reader of GGUF headers. No mlx.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The gguf package is not used, since its reader
follows declared counts beyond the end of a file.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.checkpoints.gguf.tensors import kinds, stored_bytes
from tandem.errors import BrokenModel, UnsupportedModel
from tandem.json_types import JsonObject

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_DIMENSIONS = 4
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.DOTALL)
"""Stem of a part's file name, as written by llama.cpp's gguf-split."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in MLX (the file has columns first)."""
    kind: int
    """ggml type number."""
    offset: int
    """Offset from the start of the file, in bytes."""


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensor directory of a GGUF file."""

    path: Path
    metadata: JsonObject
    tensors: tuple[GGUFTensor, ...]


def model_stem(path: Path) -> str:
    """Return the name of the model in a file, without the number of a part."""
    part = _PART.fullmatch(path.stem)
    return part[1] if part else path.stem


def parts_of(path: Path) -> list[Path]:
    """Return the file, or all parts of its split model in order. Raise `BrokenModel` if one is missing."""
    part = _PART.fullmatch(path.stem)
    if part is None:
        return [path]
    parts = (path.with_name(f"{part[1]}-{i + 1:05}-of-{part[3]}{path.suffix}") for i in range(int(part[3])))
    found = []
    for one in parts:
        if not one.is_file():
            raise BrokenModel(
                f"{one}: is not there, a part of the same model as {path.name}; put all {int(part[3])} parts into one directory"
            )
        found.append(one)
    return found or [path]


def read_parts(path: Path) -> list[GGUFFile]:
    """Read the file, or all parts of its model. Raise the errors of `read_gguf`, and `BrokenModel` if parts are missing."""
    files = [read_gguf(one) for one in parts_of(path)]
    count = files[0].metadata.get("split.count", 0)
    if count not in (0, len(files)):
        raise BrokenModel(
            f"{path}: is a part of a model in {str(count)[:20]} parts; give each the name that it had, "
            "such as model-00001-of-00002.gguf"
        )
    return files


class _Reader:
    """Sequential reader of a GGUF header. Raises EOFError if the file ends within it.

    Every value consumes bytes of the file, so a forged count cannot cause loops or allocations beyond the file's size.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self.at = 0

    def scalar(self, kind: int) -> Any:
        code = "<" + _SCALARS[kind]
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def take(self, count: int) -> memoryview:
        if count > len(self._data) - self.at:
            raise EOFError
        self.at += count
        return self._data[self.at - count : self.at]

    def string(self) -> str:
        return bytes(self.take(self.scalar(10))).decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(kind)
        inner, count = self.scalar(4), self.scalar(10)
        if inner in (_STRING, _ARRAY):
            return [self.value(inner) for _ in range(count)]
        code = np.dtype("<" + {"B": "u1", "b": "i1", "?": "?"}.get(_SCALARS[inner], _SCALARS[inner]))
        return np.frombuffer(self.take(count * code.itemsize), code).tolist()


def read_gguf(path: Path) -> GGUFFile:
    """Read the header of a GGUF file (version 2 or 3, little-endian). Raise `BrokenModel`, `UnsupportedModel`."""
    data = _mapped(path)
    if bytes(data[:4]) != b"GGUF":
        raise BrokenModel(f"{path}: is not a GGUF file")
    reader = _Reader(data.data)
    try:
        reader.take(4)
        version = reader.scalar(4)
        if version not in (2, 3):
            raise UnsupportedModel(f"{path}: GGUF version {version} is not supported (2 and 3 are)")
        count, entries = reader.scalar(10), reader.scalar(10)
        metadata = {}
        for _ in range(entries):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar(4))
        tensors = [_tensor(reader) for _ in range(count)]
    except (EOFError, KeyError, struct.error, RecursionError) as error:
        raise BrokenModel(f"{path}: truncated or damaged GGUF header; copy it again") from error
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0:
        raise BrokenModel(f"{path}: general.alignment is {align!r:.100}, not a number of bytes")
    start = (reader.at + align - 1) // align * align
    tensors = [GGUFTensor(t.name, t.shape, t.kind, start + t.offset) for t in tensors]
    for tensor in tensors:
        _check_tensor(path, tensor, data.size)
    return GGUFFile(path, metadata, tuple(tensors))


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path}: cannot be read: {error}") from error


def _check_tensor(path: Path, tensor: GGUFTensor, size: int) -> None:
    """Raise `BrokenModel` unless a tensor of a supported type has a valid shape and lies within the file's `size` bytes."""
    if not 1 <= len(tensor.shape) <= MAX_DIMENSIONS or 0 in tensor.shape:
        raise BrokenModel(f"{path}: tensor {tensor.name} has the shape {list(tensor.shape)[:9]}")
    kind = kinds().get(tensor.kind)
    if kind is None:
        return  # refused later, with its name
    if tensor.shape[-1] % kind.block:
        raise BrokenModel(
            f"{path}: tensor {tensor.name} has rows of {tensor.shape[-1]} values, which is no whole "
            f"number of blocks of {kind.block}"
        )
    if tensor.offset + stored_bytes(tensor.kind, tensor.shape) > size:
        raise BrokenModel(f"{path}: truncated: tensor {tensor.name} ends after the file; copy it again")


def _tensor(reader: _Reader) -> GGUFTensor:
    name = reader.string()
    shape = tuple(reader.scalar(10) for _ in range(reader.scalar(4)))
    return GGUFTensor(name, shape[::-1], reader.scalar(4), reader.scalar(10))
