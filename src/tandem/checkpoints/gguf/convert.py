"""GGUF files of the llama family, converted into MLX model directories without loss. No mlx.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Q4_0, Q4_1 and Q8_0 become MLX's affine 4 and 8 bit
with groups of 32 (same numbers, other packing); F16, BF16 and F32 stay. llama.cpp stores the rows of query and key
projections in the order of its own rotary embedding; they are put back into the usual order.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tandem.checkpoints.gguf.config import model_config
from tandem.checkpoints.gguf.tensors import (
    GROUP,
    QUANT_BITS,
    SUPPORTED,
    TYPE_NAMES,
    convert_tensor,
    mlx_name,
    stored_bytes,
)
from tandem.checkpoints.gguf.tokenizer import write_tokenizer
from tandem.checkpoints.safetensors import PendingTensor, write_safetensors
from tandem.env import cache_dir
from tandem.errors import BrokenModel, ModelError, UnsupportedModel

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_DIMENSIONS = 4
_FORMAT = 2  # raised when converted directories from before must not be used any more


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor of the file."""

    name: str
    shape: tuple[int, ...]
    """Rows first, as in MLX (the file has columns first)."""
    kind: int
    """ggml type number."""
    offset: int
    """Bytes from the start of the file."""


@dataclass(frozen=True)
class GGUFFile:
    """Metadata and tensor directory of a GGUF file."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GGUFTensor, ...]


class _Reader:
    """Values of a GGUF header in turn. Raises EOFError when the file ends within it.

    Every value takes bytes of the file, so that no announced count makes it loop or allocate beyond the file's size.
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

    def value(self, kind: int) -> Any:
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
    """Read the header of a GGUF file (version 2 or 3, little-endian). Raises `BrokenModel`, `UnsupportedModel`."""
    data = _mapped(path)
    if bytes(data[:4]) != b"GGUF":
        raise BrokenModel(f"{path}: is not a GGUF file", param="model")
    reader = _Reader(data.data)
    try:
        reader.take(4)
        version = reader.scalar(4)
        if version not in (2, 3):
            raise UnsupportedModel(f"{path}: GGUF version {version} is not supported (2 and 3 are)", param="model")
        count, entries = reader.scalar(10), reader.scalar(10)
        metadata = {}
        for _ in range(entries):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar(4))
        tensors = [_tensor(reader) for _ in range(count)]
    except (EOFError, KeyError, struct.error, RecursionError) as error:
        raise BrokenModel(f"{path}: truncated or damaged GGUF header; copy it again", param="model") from error
    align = metadata.get("general.alignment", 32)
    if not isinstance(align, int) or align <= 0:
        raise BrokenModel(f"{path}: general.alignment is {align!r:.100}, not a number of bytes", param="model")
    start = (reader.at + align - 1) // align * align
    tensors = [GGUFTensor(t.name, t.shape, t.kind, start + t.offset) for t in tensors]
    for tensor in tensors:
        _check_tensor(path, tensor, data.size)
    return GGUFFile(path, metadata, tuple(tensors))


def _mapped(path: Path) -> np.ndarray:
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise BrokenModel(f"{path}: cannot be read: {error}", param="model") from error


def _check_tensor(path: Path, tensor: GGUFTensor, size: int) -> None:
    """Does a tensor of a supported type have a shape, and lie within the file's `size` bytes?"""
    if not 1 <= len(tensor.shape) <= MAX_DIMENSIONS or 0 in tensor.shape:
        raise BrokenModel(f"{path}: tensor {tensor.name} has the shape {list(tensor.shape)[:9]}", param="model")
    if tensor.kind in QUANT_BITS and tensor.shape[-1] % GROUP:
        raise BrokenModel(f"{path}: tensor {tensor.name} has rows of {tensor.shape[-1]} values, which is no whole "
                          f"number of blocks of {GROUP}", param="model")
    if tensor.kind in SUPPORTED and tensor.offset + stored_bytes(tensor.kind, tensor.shape) > size:
        raise BrokenModel(f"{path}: truncated: tensor {tensor.name} ends after the file; copy it again", param="model")


def _tensor(reader: _Reader) -> GGUFTensor:
    name = reader.string()
    shape = tuple(reader.scalar(10) for _ in range(reader.scalar(4)))
    return GGUFTensor(name, shape[::-1], reader.scalar(4), reader.scalar(10))


def convert_gguf(source: Path, directory: Path, progress: Callable[[int, int], None] | None = None) -> None:
    """Write `source` as an MLX model into the existing, empty `directory`.

    `progress` gets bytes done and in all. Peak memory is about one tensor. Raises `UnsupportedModel` for an
    architecture, tensor type or tokenizer that is not supported, `BrokenModel` for a damaged file.
    """
    try:
        _convert(source, directory, progress)
    except (ModelError, OSError):
        raise
    except Exception as error:
        # Metadata can be wrong in more ways than are worth a check each, and tokenizers raises plain Exception.
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BrokenModel(f"{source}: metadata or tensors contradict one another ({text})", param="model") from error


def _convert(source: Path, directory: Path, progress: Callable[[int, int], None] | None) -> None:
    file = read_gguf(source)
    for tensor in file.tensors:
        if tensor.kind not in SUPPORTED:
            kind = TYPE_NAMES.get(tensor.kind, f"number {tensor.kind}")
            raise UnsupportedModel(
                f"{source}: tensor type {kind} ({tensor.name}) is not supported; supported are "
                f"{', '.join(SUPPORTED.values())}",
                param="model",
            )
    data = np.memmap(source, np.uint8, "r")
    factors = [_plain(data, t) for t in file.tensors if t.name == "rope_freqs.weight"]
    shapes = {t.name: t.shape for t in file.tensors}
    config = model_config(file.metadata, shapes, factors[0] if factors else None, str(source))
    heads = config["num_attention_heads"], config["num_key_value_heads"]
    total = sum(stored_bytes(t.kind, t.shape) for t in file.tensors)
    done = 0

    def read(tensor: GGUFTensor) -> dict[str, np.ndarray]:
        nonlocal done
        size = stored_bytes(tensor.kind, tensor.shape)
        parts = convert_tensor(data[tensor.offset : tensor.offset + size], tensor.kind, tensor.shape)
        done += size
        if progress is not None:
            progress(done, total)
        return _unpermute(tensor.name, parts, heads, config["model_type"])

    pending, bits = _pending(file, read)
    if bits:
        config["quantization"] = _quantization(bits)
    write_safetensors(directory / "model.safetensors", pending)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(file.metadata, directory, str(source))


def _plain(data: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    size = stored_bytes(tensor.kind, tensor.shape)
    return convert_tensor(data[tensor.offset : tensor.offset + size], tensor.kind, tensor.shape)["weight"]


def _pending(
    file: GGUFFile, read: Callable[[GGUFTensor], dict[str, np.ndarray]]
) -> tuple[list[PendingTensor], dict[str, int]]:
    """Tensors to write, and the bits of those that are quantised, by module path."""
    pending: list[PendingTensor] = []
    bits: dict[str, int] = {}
    for tensor in file.tensors:
        name = mlx_name(tensor.name)
        if name is None:
            continue
        parts = _Once(lambda tensor=tensor: read(tensor))  # type: ignore[misc]
        if tensor.kind in QUANT_BITS:
            base = name.removesuffix(".weight")
            bits[base] = width = QUANT_BITS[tensor.kind]
            rows, columns = tensor.shape[:-1], tensor.shape[-1]
            pending += [
                PendingTensor(f"{base}.weight", "U32", (*rows, columns * width // 32), parts.part("weight")),
                PendingTensor(f"{base}.scales", "F16", (*rows, columns // 32), parts.part("scales")),
                PendingTensor(f"{base}.biases", "F16", (*rows, columns // 32), parts.part("biases")),
            ]
        else:
            pending.append(PendingTensor(name, SUPPORTED[tensor.kind], tensor.shape, parts.part("weight")))
    return pending, bits


class _Once:
    """Converts a tensor when its first part is written and forgets it after the last."""

    def __init__(self, convert: Callable[[], dict[str, np.ndarray]]) -> None:
        self._convert = convert
        self._parts: dict[str, np.ndarray] = {}

    def part(self, name: str) -> Callable[[], np.ndarray]:
        def take() -> np.ndarray:
            if not self._parts:
                self._parts = self._convert()
            return self._parts.pop(name)

        return take


def _quantization(bits: dict[str, int]) -> dict[str, Any]:
    """MLX's settings: the commonest width for all, exceptions by path."""
    widths = list(bits.values())
    common = max(set(widths), key=widths.count)
    settings: dict[str, Any] = {"group_size": 32, "bits": common, "mode": "affine"}
    settings |= {path: {"group_size": 32, "bits": width} for path, width in bits.items() if width != common}
    return settings


def _unpermute(name: str, parts: dict[str, np.ndarray], heads: tuple[int, int], family: str) -> dict[str, np.ndarray]:
    """Undo llama.cpp's order of query and key rows (architecture llama alone): pairs back into halves."""
    if family != "llama" or not name.endswith(("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")):
        return parts
    count = heads[0] if "attn_q" in name else heads[1]

    def restore(array: np.ndarray) -> np.ndarray:
        half = array.shape[0] // count // 2
        return array.reshape(count, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return {key: restore(array) for key, array in parts.items()}


def convert_cached(source: Path, progress: Callable[[int, int], None] | None = None) -> Path:
    """The MLX directory of a GGUF file in the cache directory, converted unless it is there already."""
    status = source.stat()
    key = f"{_FORMAT}:{source.resolve()}:{status.st_size}:{status.st_mtime_ns}"
    target = cache_dir() / "gguf" / f"{source.stem}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not (target / "config.json").is_file():
        with new_directory(target) as directory:
            convert_gguf(source, directory, progress)
    return target


@contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """A temporary directory that becomes `target` if the block succeeds, and vanishes if it fails.

    When someone else has made `target` meanwhile, theirs stays. Raises `ModelError` when the disk cannot be written.
    """
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise ModelError(
            f"{target}: cannot be written: {error.strerror}; set TANDEM_CACHE", param="TANDEM_CACHE"
        ) from error
    try:
        yield temporary
        if not (target / "config.json").is_file():
            shutil.rmtree(target, ignore_errors=True)
            temporary.chmod(0o755)
            try:
                os.rename(temporary, target)
            except OSError:
                if not (target / "config.json").is_file():
                    raise
    except OSError as error:
        raise ModelError(f"{target}: cannot be written: {error.strerror or error}", param="TANDEM_CACHE") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
