"""GGUF files, converted into MLX model directories. No mlx.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What MLX can hold stays packed, other quantisations
are expanded (`tensors.py`). What llama.cpp stores in another way is put back: the rows of Llama's query and key
projections, in the order of its own rotary embedding, and Gemma's norms, which are one larger.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from tandem.checkpoints.gguf.config import model_config
from tandem.checkpoints.gguf.header import GGUFTensor, model_stem, parts_of, read_parts
from tandem.checkpoints.gguf.names import mlx_name
from tandem.checkpoints.gguf.tensors import (
    GROUP,
    PLAIN,
    bfloat16,
    converted,
    expanded,
    kind_name,
    kinds,
    settings_of,
    stored_bytes,
)
from tandem.checkpoints.gguf.tokenizer import write_tokenizer
from tandem.checkpoints.progress import Progress, counter
from tandem.checkpoints.pruning import in_use_by_us, used
from tandem.checkpoints.safetensors import PendingTensor, write_safetensors
from tandem.env import cache_dir
from tandem.errors import BrokenModel, ModelError, UnsupportedModel

_FORMAT = 3  # raised when converted directories from before must not be used any more


def convert_gguf(source: Path, directory: Path, progress: Progress | None = None) -> None:
    """Write `source`, with the other parts of its model if it is one, as an MLX model into `directory`, which is empty.

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


def _convert(source: Path, directory: Path, progress: Progress | None) -> None:
    files = read_parts(source)
    metadata, tensors = files[0].metadata, [tensor for file in files for tensor in file.tensors]
    for tensor in tensors:
        if tensor.kind not in kinds():
            raise UnsupportedModel(
                f"{source}: tensor type {kind_name(tensor.kind)} ({tensor.name}) is not supported; supported are "
                f"{', '.join(kind.name for kind in kinds().values())}",
                param="model",
            )
    mapped = ((np.memmap(file.path, np.uint8, "r"), file.tensors) for file in files)
    data = {tensor.name: whole for whole, held in mapped for tensor in held}
    shapes = {t.name: t.shape for t in tensors}
    factors = {t.name: _plain(data[t.name], t) for t in tensors if t.name.startswith(("rope_freqs.", "rope_factors_"))}
    config = model_config(metadata, shapes, factors, str(source))
    total = sum(stored_bytes(t.kind, t.shape) for t in tensors)
    writer = _Writer(data, str(metadata.get("general.architecture")), config, counter(progress, total))
    pending = [part for tensor in tensors for part in writer.parts(tensor)]
    if writer.packed:
        config["quantization"] = _quantization(writer.packed)
    write_safetensors(directory / "model.safetensors", pending)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(metadata, directory, str(source))


def _plain(data: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    size = stored_bytes(tensor.kind, tensor.shape)
    return expanded(data[tensor.offset : tensor.offset + size], tensor.kind, tensor.shape, "F16")


class _Writer:
    """Says which tensors are to be written, and makes them when their turn comes."""

    def __init__(
        self, data: Mapping[str, np.ndarray], architecture: str, config: dict[str, Any],
        progressed: Callable[[int], None],
    ) -> None:
        self._data = data
        """The file that a tensor is in, by its name."""
        self._architecture = architecture
        self._gemma = architecture.startswith("gemma")
        # Gemma's activations are too large for float16, and the embedding's type is that of the activations.
        self._dtype = "BF16" if self._gemma else "F16"
        self._heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._progressed = progressed
        self.packed: dict[str, int] = {}
        """Type numbers of what stays packed, by module path."""

    def parts(self, tensor: GGUFTensor) -> list[PendingTensor]:
        """What becomes of a tensor of the file."""
        name = mlx_name(tensor.name, self._architecture)
        if name is None:
            return []
        kind, rows, columns = kinds()[tensor.kind], tensor.shape[:-1], tensor.shape[-1]
        wide = self._gemma and name == "model.embed_tokens.weight"
        parts = _Once(lambda: self._read(tensor, wide))
        if not kind.bits or wide:
            dtype = PLAIN.get(tensor.kind, self._dtype)
            dtype = "BF16" if wide and dtype == "F16" else dtype
            return [PendingTensor(name, dtype, tensor.shape, parts.part("weight"))]
        base = name.removesuffix(".weight")
        self.packed[base] = tensor.kind
        scale = "F16" if kind.mode == "affine" else "U8"
        pending = [
            PendingTensor(f"{base}.weight", "U32", (*rows, columns * kind.bits // 32), parts.part("weight")),
            PendingTensor(f"{base}.scales", scale, (*rows, columns // GROUP), parts.part("scales")),
        ]
        if kind.mode == "affine":
            pending.append(PendingTensor(f"{base}.biases", "F16", (*rows, columns // GROUP), parts.part("biases")))
        return pending

    def _read(self, tensor: GGUFTensor, wide: bool) -> dict[str, np.ndarray]:
        size = stored_bytes(tensor.kind, tensor.shape)
        data = self._data[tensor.name][tensor.offset : tensor.offset + size]
        if wide:
            weight = expanded(data, tensor.kind, tensor.shape, "BF16")
            parts = {"weight": bfloat16(weight) if weight.dtype == np.float16 else weight}
        else:
            parts = converted(data, tensor.kind, tensor.shape, self._dtype)
        self._progressed(size)
        if self._gemma and tensor.name.endswith("norm.weight"):
            weight = parts["weight"]
            if weight.dtype == np.uint16:
                return {"weight": bfloat16((weight.astype(np.uint32) << 16).view(np.float32) - 1)}
            return {"weight": weight - 1}
        return _unpermute(tensor.name, parts, self._heads, self._architecture)


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


def _quantization(packed: dict[str, int]) -> dict[str, Any]:
    """MLX's settings: the commonest for all, exceptions by path."""
    numbers = list(packed.values())
    common = max(set(numbers), key=numbers.count)
    usual = settings_of(common)
    exceptions = {path: settings_of(number) for path, number in packed.items()}
    return {"mode": "affine", **usual, **{path: own for path, own in exceptions.items() if own != usual}}


def _unpermute(
    name: str, parts: dict[str, np.ndarray], heads: tuple[int, int], architecture: str
) -> dict[str, np.ndarray]:
    """Undo llama.cpp's order of query and key rows (architecture llama alone): pairs back into halves."""
    if architecture != "llama" or not name.endswith(("attn_q.weight", "attn_k.weight", "attn_q.bias", "attn_k.bias")):
        return parts
    count = heads[0] if "attn_q" in name else heads[1]

    def restore(array: np.ndarray) -> np.ndarray:
        half = array.shape[0] // count // 2
        return array.reshape(count, half, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)

    return {key: restore(array) for key, array in parts.items()}


def convert_cached(source: Path, progress: Progress | None = None) -> Path:
    """The MLX directory of a GGUF file, or of all parts of its model, in the cache directory; converted unless it is
    there already."""
    found = [(part, part.stat()) for part in parts_of(source)]
    key = ":".join([str(_FORMAT), *(f"{part.resolve()}:{one.st_size}:{one.st_mtime_ns}" for part, one in found)])
    target = cache_dir() / "gguf" / f"{model_stem(source)}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not (target / "config.json").is_file():
        with new_directory(target) as directory:
            convert_gguf(source, directory, progress)
    used(target)
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
    using = in_use_by_us(temporary)
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
        os.close(using)
        shutil.rmtree(temporary, ignore_errors=True)
