"""Models with the widths of published ones and few layers: config and random weights, written as fast as a disk takes.

No weight is computed: bytes come from a pool of random numbers that is gone through again and again, its length prime
to what models have. Values have about the size at which activations keep theirs, so that logits tell right from wrong.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from tandem.checkpoints.safetensors import TensorInfo, encode_header
from tandem.planner.presets import Planned, Preset, planned, presets
from tandem.testing import EOS, write_tokenizer

CASES: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("real_widths.json").read_text())
"""Published configs, and which of their layers to take so that each kind of layer is there."""
GROUP = 64
POOL = 16_777_213
"""Numbers in the pool, a prime."""
TOKENIZER = 512
"""Entries of the tokenizer: prompts are ids, so no more is needed."""
_NARROW = (
    "hidden_size",
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "kv_lora_rank",
    "q_lora_rank",
)
_FEWER = {
    "num_attention_heads": 8,
    "n_routed_experts": 16,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_key_value_heads": 8,
    "index_n_heads": 8,
    "linear_num_value_heads": 8,
    "linear_num_key_heads": 4,
}
_TYPES = {"uint32": "U32", "uint8": "U8", "bfloat16": "BF16", "float32": "F32", "float16": "F16"}
_SIZES = {"U32": 4, "U8": 1, "BF16": 2, "F32": 4, "F16": 2}


class Cut(NamedTuple):
    """A model of few layers."""

    config: dict[str, Any]
    preset: Preset
    """What the planner knows of the whole model, with these layers alone."""
    layers: list[int]
    """Their numbers in the whole model."""

    def planned(self, quant: str) -> Planned:
        """As the planner sees it with its weights stored as `quant` says."""
        return planned("cut", self.preset, quant)


def cut(name: str, *, short: bool = False, shrink: int = 1) -> Cut:
    """The case `name` of `real_widths.json`. `short` takes two layers; `shrink` divides all widths, for trying out."""
    case = CASES[name]
    layers = case["short" if short else "layers"]
    config = copy.deepcopy(case["config"])
    inner = config.get("text_config", config)
    inner.update(case["short_changes" if short else "changes"], num_hidden_layers=len(layers))
    config["eos_token_id"] = EOS
    for one in {id(one): one for one in (config, inner)}.values() if shrink > 1 else ():
        one.update({key: max(one[key] // shrink, 64) for key in _NARROW if one.get(key)})
        one.update({key: min(one[key], most) for key, most in _FEWER.items() if one.get(key)})
        one.update({"vocab_size": 2048} if "vocab_size" in one else {})
    whole = presets()[case["preset"]]
    each = [row[1:] for row in whole.layers for _ in range(row[0])]
    caches = [row[1:] for row in whole.cache for _ in range(row[0])]
    preset = msgspec.structs.replace(whole, layers=[(1, *each[i]) for i in layers], cache=[(1, *caches[i]) for i in layers])
    return Cut(config, preset, layers)


def write(config: dict[str, Any], directory: Path, quant: str) -> int:
    """Write config, tokenizer and weights, as `mlx_lm.convert` stores them; returns bytes of weights.

    `quant` is `4bit`, `8bit` or `bf16`.
    """
    config = copy.deepcopy(config)
    tensors = _tensors(config, quant)
    directory.mkdir(parents=True, exist_ok=True)
    offset, infos = 0, {}
    for name, (kind, shape) in tensors.items():
        size = _SIZES[kind] * math.prod(shape)
        infos[name] = TensorInfo(kind, shape, size, offset)
        offset += size
    values = _Values()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(encode_header(infos))
        for name, (kind, shape) in tensors.items():
            for piece in values.of(name, kind, shape, quant):
                file.write(piece)
    write_tokenizer(directory, TOKENIZER)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return offset


def _tensors(config: dict[str, Any], quant: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of all weights, from mlx-lm's module, which is not computed; `config` gets its quantisation."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.utils import _get_classes, quantize_model

    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(copy.deepcopy(config)))
    keeps = getattr(model, "cast_predicate", lambda name: True)
    if quant != "bf16":
        model, stored = quantize_model(model, config, GROUP, int(quant.removesuffix("bit")))
        config["quantization"] = stored["quantization"]
    found = {}
    for name, array in tree_flatten(model.parameters()):
        kind = str(array.dtype).removeprefix("mlx.core.")
        if mx.issubdtype(array.dtype, mx.floating):
            kind = "bfloat16" if keeps(name) else "float32"
        found[name] = (_TYPES[kind], tuple(array.shape))
    return found


class _Values:
    """Bytes of tensors."""

    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        normal = rng.standard_normal(POOL, dtype=np.float32)
        self._bits = rng.integers(0, 2**32, POOL, dtype=np.uint32)
        self._normal = (normal.view(np.uint32) >> 16).astype(np.uint16)  # bfloat16 is float32's first half
        self._scaled: dict[int, np.ndarray[Any, Any]] = {}
        self._at = 0

    def of(self, name: str, kind: str, shape: tuple[int, ...], quant: str) -> Any:
        """Pieces of one tensor. Products with a matrix of n columns keep the size of what goes in."""
        last, count = name.rpartition(".")[2], math.prod(shape)
        if kind == "U32":
            return self._cycle(self._bits, count)
        if last in ("scales", "biases"):
            levels = 2 ** int(quant.removesuffix("bit")) - 1
            scale = self._size(name, shape[-1] * GROUP) / (levels / math.sqrt(12))
            return _fill(kind, count, scale if last == "scales" else -scale * levels / 2)
        if len(shape) == 1 or kind == "F32":
            one = last in ("weight", "layer_scalar", "scale", "dt_bias") or "norm" in name or "scale" in last
            return _fill(kind, count, 1.0 if one else 0.0)
        columns = math.prod(shape[1:]) if "conv" in name else shape[-1]
        return self._cycle(self._halved(round(-math.log2(self._size(name, columns)))), count)

    @staticmethod
    def _size(name: str, columns: int) -> float:
        """Standard deviation of a matrix; a larger one of what makes logits, so that they are not all alike."""
        return (3 if "embed_tokens" in name or "lm_head" in name else 1) / math.sqrt(columns)

    def _halved(self, times: int) -> np.ndarray[Any, Any]:
        """The normal numbers as bfloat16, divided by 2 so often: what is very small becomes 0."""
        if times not in self._scaled:
            exponent = (self._normal >> 7) & 0xFF
            self._scaled[times] = np.where(exponent > times, self._normal - np.uint16(max(times, 0) << 7), 0).astype(np.uint16)
        return self._scaled[times]

    def _cycle(self, pool: np.ndarray[Any, Any], count: int) -> Any:
        while count:
            piece = pool[self._at : self._at + count]
            self._at = (self._at + len(piece)) % len(pool)
            count -= len(piece)
            yield memoryview(piece).cast("B")


def _fill(kind: str, count: int, value: float) -> Any:
    if kind == "F32":
        yield np.full(count, value, np.float32).tobytes()
        return
    if kind != "BF16":
        raise ValueError(f"a {kind} tensor of {value}")
    yield np.full(count, np.array(value, np.float32).view(np.uint32) >> 16, np.uint16).tobytes()
