"""Headers of safetensors files, and a writer that holds one tensor in memory at a time. No mlx.

Format: 8 bytes little-endian header length, JSON header, data (https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tandem.errors import BrokenModel
from tandem.json_types import JsonObject
from tandem.protocol.codec import UNREADABLE
from tandem.system.files import file_trouble

if TYPE_CHECKING:
    import numpy as np

_MAX_HEADER = 100_000_000  # bytes, the format's own limit
_SIZES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4, "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
          "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}  # fmt: skip


@dataclass(frozen=True)
class TensorInfo:
    """One tensor, as described in a header."""

    dtype: str
    """safetensors' name of the type: BF16, U32 ..."""
    shape: tuple[int, ...]
    nbytes: int
    offset: int = 0
    """Offset of the data from the start of the file, in bytes."""


class _Entry(msgspec.Struct):
    """One tensor's entry in the header's JSON."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def read_header(path: Path, *, header_only: bool = False) -> dict[str, TensorInfo]:
    """Return the tensors of a file by name; `header_only` for a copy that ends after the header.

    Raise `BrokenModel` if the header is invalid or does not match the file's length.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = _length(file.read(8))
            if not 8 < start <= size:
                raise _broken(path, f"it is {size} bytes long and has no valid header")
            raw = msgspec.json.decode(file.read(start - 8), type=dict[str, msgspec.Raw])
        tensors, end = _tensors(raw, start)
    except OSError as error:
        raise BrokenModel(f"{path}: cannot be read: {file_trouble(error)}", param=str(path)) from error
    except UNREADABLE as error:
        raise _broken(path, f"its header is not valid ({error})") from error
    described = start + (0 if header_only else end)
    if described != size:
        raise _broken(path, f"its header describes {described} bytes but the file has {size}")
    return tensors


def header_length(start: bytes) -> int:
    """Return the length of a file's header in bytes, its length field included, from the first 8 bytes. Raise
    ValueError."""
    if not (length := _length(start)):
        raise ValueError("has no valid safetensors header")
    return length


def _length(start: bytes) -> int:
    length = int(struct.unpack("<Q", start)[0]) if len(start) == 8 else 0
    return 8 + length if 0 < length <= _MAX_HEADER else 0


def encode_header(tensors: Mapping[str, TensorInfo]) -> bytes:
    """Return the start of a file, up to its data, for `tensors`, whose `offset` counts from the start of the data."""
    header: JsonObject = {"__metadata__": {"format": "mlx"}}
    for name, tensor in tensors.items():
        offsets = [tensor.offset, tensor.offset + tensor.nbytes]
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _tensors(raw: dict[str, msgspec.Raw], data: int) -> tuple[dict[str, TensorInfo], int]:
    """Return the tensors, and the bytes of data they cover. Raise ValueError for an inconsistent entry."""
    tensors, end = {}, 0
    decode = msgspec.json.Decoder(_Entry).decode
    for name, text in raw.items():
        if name == "__metadata__":
            continue
        entry = decode(text)
        first, last = entry.data_offsets
        size = _SIZES.get(entry.dtype)
        fits = size is None or last - first == size * math.prod(entry.shape)
        if not 0 <= first <= last or min(entry.shape, default=0) < 0 or not fits:
            raise ValueError(f"{name[:200]}: {entry.dtype}{list(entry.shape)} in bytes {first} to {last}")
        tensors[name] = TensorInfo(entry.dtype, entry.shape, last - first, data + first)
        end = max(end, last)
    return tensors, end


def _broken(path: Path, why: str) -> BrokenModel:
    return BrokenModel(f"{path}: truncated or damaged: {why}; download or copy it again", param=str(path))


@dataclass(frozen=True)
class PendingTensor:
    """A tensor to be written, of known type and shape; `data` is called when the tensor is written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: Callable[[], np.ndarray]
    """Returns the array, whose bytes are written in C order."""


def write_safetensors(path: Path, tensors: Iterable[PendingTensor]) -> None:
    """Write a safetensors file. Peak memory is one tensor. Raise ValueError if data does not match type and shape."""
    from numpy import ascontiguousarray

    pending = list(tensors)
    header: dict[str, TensorInfo] = {}
    offset = 0
    for tensor in pending:
        nbytes = _SIZES[tensor.dtype] * math.prod(tensor.shape)
        header[tensor.name] = TensorInfo(tensor.dtype, tensor.shape, nbytes, offset)
        offset += nbytes
    with path.open("wb") as file:
        file.write(encode_header(header))
        for tensor in pending:
            data = ascontiguousarray(tensor.data())
            if data.nbytes != header[tensor.name].nbytes:
                raise ValueError(f"{tensor.name}: {data.nbytes} bytes do not make up {tensor.dtype}{tensor.shape}")
            file.write(data.tobytes())
