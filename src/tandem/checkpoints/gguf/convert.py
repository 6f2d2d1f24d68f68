"""Conversion of GGUF files to MLX model directories. No mlx.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Formats that MLX supports stay packed; others are
expanded (`tensors.py`). Changes that llama.cpp's converter makes are reverted: the order of rows (`names.py`), the 1
added to Gemma's norms, and the transformed decays of linear attention.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from tandem.checkpoints.files import Progress, counter
from tandem.checkpoints.gguf.config import model_config
from tandem.checkpoints.gguf.header import GGUFTensor, model_stem, parts_of, read_parts
from tandem.checkpoints.gguf.names import PAIRS, grouped, mlx_names
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
from tandem.checkpoints.safetensors import PendingTensor, write_safetensors
from tandem.checkpoints.stored import new_directory, used
from tandem.env import cache_dir
from tandem.errors import BrokenModel, ModelError, UnsupportedModel
from tandem.json_types import JsonObject

_FORMAT = 4  # raised when older converted directories become unusable
_CONVOLUTIONS = ("conv1d.weight", "conv.conv.weight")
"""Convolution kernels per channel, which in MLX have an extra last axis of one input."""


def convert_gguf(source: Path, directory: Path, progress: Progress | None = None) -> None:
    """Convert `source`, and the other parts of its model if it is split, to an MLX model in the empty `directory`.

    `progress` is called with bytes done and in all. Peak memory is about one tensor. Raise `UnsupportedModel` for an
    architecture, tensor type or tokenizer that is not supported, `BrokenModel` for a damaged file.
    """
    try:
        _convert(source, directory, progress)
    except (ModelError, OSError):
        raise
    except Exception as error:
        # Metadata can be wrong in more ways than are checked, and tokenizers raises plain Exception.
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BrokenModel(f"{source}: metadata or tensors contradict one another ({text})") from error


def _convert(source: Path, directory: Path, progress: Progress | None) -> None:
    files = read_parts(source)
    metadata, tensors = files[0].metadata, [tensor for file in files for tensor in file.tensors]
    for tensor in tensors:
        if tensor.kind not in kinds():
            raise UnsupportedModel(
                f"{source}: tensor type {kind_name(tensor.kind)} ({tensor.name}) is not supported; supported are "
                f"{', '.join(kind.name for kind in kinds().values())}"
            )
    mapped = ((np.memmap(file.path, np.uint8, "r"), file.tensors) for file in files)
    data = {tensor.name: whole for whole, held in mapped for tensor in held}
    shapes = {t.name: t.shape for t in tensors}
    factors = {t.name: _plain(data[t.name], t) for t in tensors if t.name.startswith(("rope_freqs.", "rope_factors_"))}
    config = model_config(metadata, shapes, factors, str(source))
    total = sum(stored_bytes(t.kind, t.shape) for t in tensors)
    writer = _Writer(data, str(metadata.get("general.architecture")), config, counter(progress, total))
    pending = [part for tensor in tensors for part in writer.parts(tensor)]
    if config.get("attention_bias") and writer.architecture in PAIRS and "blk.0.attn_output.bias" not in shapes:
        # mlx-lm's module has biases for all four projections or none.
        none = np.zeros(config["hidden_size"], np.float32)
        pending += [
            PendingTensor(f"model.layers.{i}.self_attn.o_proj.bias", "F32", none.shape, lambda: none)
            for i in range(config["num_hidden_layers"])
        ]
    if writer.packed:
        config["quantization"] = _quantization(writer.packed)
    write_safetensors(directory / "model.safetensors", pending)
    (directory / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    write_tokenizer(metadata, directory, str(source))


def _plain(data: np.ndarray, tensor: GGUFTensor) -> np.ndarray:
    size = stored_bytes(tensor.kind, tensor.shape)
    return expanded(data[tensor.offset : tensor.offset + size], tensor.kind, tensor.shape, "F16")


class _Writer:
    """Plan of the tensors to write; each is converted when it is written."""

    def __init__(
        self, data: Mapping[str, np.ndarray], architecture: str, config: JsonObject, progressed: Callable[[int], None]
    ) -> None:
        self._data = data
        """Contents of the file that holds a tensor, by the tensor's name."""
        self.architecture = architecture
        self._gemma = architecture.startswith("gemma")
        # Gemma's activations overflow float16, and they have the embedding's type.
        self._dtype = "BF16" if self._gemma else "F16"
        self._config = config.get("text_config", config)
        self._progressed = progressed
        self.packed: dict[str, int] = {}
        """ggml type numbers of tensors that stay packed, by module path."""

    def parts(self, tensor: GGUFTensor) -> Iterator[PendingTensor]:
        """Yield the MLX tensors to write for one tensor of the GGUF file."""
        axis = max(len(tensor.shape) - 2, 0)
        names = list(mlx_names(tensor.name, self.architecture, tensor.shape[axis], self._config))
        for name, order in names:
            shape = tensor.shape
            if order is not None:
                shape = (*shape[:axis], len(order), *shape[axis + 1 :])
            if name.endswith(_CONVOLUTIONS):
                shape = (*shape, 1)
            elif name.endswith("shared_expert_gate.weight"):
                shape = (1, shape[-1])
            yield from self._part(tensor, name, shape, order, len(names))

    def _part(
        self, tensor: GGUFTensor, name: str, shape: tuple[int, ...], order: np.ndarray | None, share: int
    ) -> Iterator[PendingTensor]:
        kind, rows, columns = kinds()[tensor.kind], shape[:-1], shape[-1]
        wide = self._gemma and name == "model.embed_tokens.weight"

        def read() -> dict[str, np.ndarray]:
            parts = self._read(tensor, wide)
            self._progressed(stored_bytes(tensor.kind, tensor.shape) // share)
            if order is not None:
                parts = {key: array.take(order, max(array.ndim - 2, 0)) for key, array in parts.items()}
            return self._restored(name, parts, shape)

        parts = _Once(read)
        if not kind.bits or wide:
            dtype = PLAIN.get(tensor.kind, self._dtype)
            dtype = "BF16" if wide and dtype == "F16" else dtype
            yield PendingTensor(name, dtype, shape, parts.part("weight"))
            return
        base = name.removesuffix(".weight")
        self.packed[base] = tensor.kind
        scale = "F16" if kind.mode == "affine" else "U8"
        yield PendingTensor(f"{base}.weight", "U32", (*rows, columns * kind.bits // 32), parts.part("weight"))
        yield PendingTensor(f"{base}.scales", scale, (*rows, columns // GROUP), parts.part("scales"))
        if kind.mode == "affine":
            yield PendingTensor(f"{base}.biases", "F16", (*rows, columns // GROUP), parts.part("biases"))

    def _read(self, tensor: GGUFTensor, wide: bool) -> dict[str, np.ndarray]:
        data = self._data[tensor.name][tensor.offset : tensor.offset + stored_bytes(tensor.kind, tensor.shape)]
        if wide:
            weight = expanded(data, tensor.kind, tensor.shape, "BF16")
            return {"weight": bfloat16(weight) if weight.dtype == np.float16 else weight}
        return converted(data, tensor.kind, tensor.shape, self._dtype)

    def _restored(self, name: str, parts: dict[str, np.ndarray], shape: tuple[int, ...]) -> dict[str, np.ndarray]:
        """Return the arrays with llama.cpp's changes to values, shape and columns reverted."""
        if name.endswith("linear_attn.A_log"):
            return {"weight": np.log(-parts["weight"])}
        if name.endswith((*_CONVOLUTIONS, "shared_expert_gate.weight")) and len(parts) == 1:
            return {"weight": parts["weight"].reshape(shape)}
        if name.endswith("linear_attn.out_proj.weight") and self.architecture.startswith("qwen35"):
            heads = np.split(grouped(shape[-1], self._config), self._config["linear_num_value_heads"])
            places = [int(head[0]) // len(head) for head in heads]
            return {
                key: array.reshape(len(array), len(heads), -1)[:, places].reshape(array.shape) for key, array in parts.items()
            }
        if self.architecture in ("gemma2", "gemma3") and name.endswith("norm.weight"):
            weight = parts["weight"]
            if weight.dtype == np.uint16:
                return {"weight": bfloat16((weight.astype(np.uint32) << 16).view(np.float32) - 1)}
            return {"weight": weight - 1}
        return parts


class _Once:
    """Converter of one tensor into parts: it runs when the first part is written, and frees each part once taken."""

    def __init__(self, convert: Callable[[], dict[str, np.ndarray]]) -> None:
        self._convert = convert
        self._parts: dict[str, np.ndarray] = {}

    def part(self, name: str) -> Callable[[], np.ndarray]:
        def take() -> np.ndarray:
            if not self._parts:
                self._parts = self._convert()
            return self._parts.pop(name)

        return take


def _quantization(packed: dict[str, int]) -> JsonObject:
    """Return MLX's quantisation settings: the most common ones, with exceptions by path."""
    numbers = list(packed.values())
    common = max(set(numbers), key=numbers.count)
    usual = settings_of(common)
    exceptions = {path: settings_of(number) for path, number in packed.items()}
    return {"mode": "affine", **usual, **{path: own for path, own in exceptions.items() if own != usual}}


def convert_cached(source: Path, progress: Progress | None = None) -> Path:
    """Return the MLX directory of a GGUF file, or of all parts of its model, in the cache; converted if not present."""
    found = [(part, part.stat()) for part in parts_of(source)]
    key = ":".join([str(_FORMAT), *(f"{part.resolve()}:{one.st_size}:{one.st_mtime_ns}" for part, one in found)])
    target = cache_dir() / "gguf" / f"{model_stem(source)}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"
    if not (target / "config.json").is_file():
        with new_directory(target) as directory:
            convert_gguf(source, directory, progress)
    used(target)
    return target
