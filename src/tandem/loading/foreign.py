"""Conversion of foreign weight formats to plain or MLX-packed weights: lazy, tensor by tensor (mlx)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import mlx.core as mx

from tandem.errors import BrokenModel
from tandem.models.quantization import Foreign

Weights = dict[str, mx.array]
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Shift, in units of 4 bits, of each of eight consecutive values in an AWQ word."""
_SCALES = ("_scale_inv", "_scale")
_HELPERS = ("_scale_inv", ".weight_scale", ".input_scale", ".activation_scale", ".weight_shape", ".g_idx",
            ".weight_g_idx", ".weight_zero_point", ".qzeros", "_activation_scale")  # fmt: skip


def converted(weights: Weights, foreign: Foreign) -> Weights:
    """Return weights with plain `weight` (fp8), or with `weight`, `scales` and `biases` in MLX's packing.

    All arrays stay lazy. Raise `BrokenModel` for tensors that do not fit together.
    """
    suffix, convert = _CONVERTERS[foreign.method]
    found: Weights = {}
    used: set[str] = set()
    for name, array in weights.items():
        if not name.endswith(suffix):
            continue
        try:
            made = convert(name.removesuffix(suffix), array, weights, foreign)
        except (KeyError, ValueError) as error:
            raise BrokenModel(f"weight {name}: does not fit its scales: {str(error)[:200]}") from error
        if made:
            used.update((name, *(f"{name.removesuffix(suffix)}.{own}" for own in ("scales", "weight"))))
            found.update(made)
    used.update(name for name in weights if name.endswith(_HELPERS) and _stem(name) + ".weight" in found)
    return {name: array for name, array in weights.items() if name not in used} | found


def _stem(name: str) -> str:
    for ending in ("_scale_inv", "_activation_scale"):
        if name.endswith(ending):
            return name.removesuffix(ending).removesuffix(".weight")
    return name.rpartition(".")[0]


def sanitized(weights: Weights, sanitize: Callable[[Weights], Weights]) -> Weights:
    """Return `sanitize(weights)`, with scales and biases of packed weights renamed and stacked like their weights.

    Most of mlx-lm's models look only for `weight` when they stack experts. Scales and biases are therefore passed
    through `sanitize` under that name.
    """
    scales = {name.removesuffix(".scales") for name in weights if name.endswith(".scales")}
    done = sanitize(dict(weights))
    if not any(name.endswith(".scales") and name.removesuffix("scales") + "weight" not in done for name in done):
        return done
    alone = {name: array for name, array in weights.items() if not name.endswith((".scales", ".biases"))}
    plain = sanitize(dict(alone))
    packed = {name for name, array in plain.items() if array.dtype == mx.uint32}
    found = dict(plain)
    for suffix in ("scales", "biases"):
        other = {
            name: weights.get(f"{name.removesuffix('.weight')}.{suffix}", array)
            if name.removesuffix(".weight") in scales else array
            for name, array in alone.items()
        }  # fmt: skip
        moved = sanitize(other)
        found.update({f"{name.removesuffix('.weight')}.{suffix}": moved[name] for name in packed
                      if moved[name].dtype != mx.uint32})  # fmt: skip
    return found


def _fp8(base: str, weight: mx.array, weights: Mapping[str, mx.array], foreign: Foreign) -> Weights:
    name = f"{base}.weight"
    scale = next((weights[name + ending] for ending in _SCALES if name + ending in weights), None)
    if scale is None or weight.dtype != mx.uint8:
        return {}
    return {name: expanded_fp8(weight, scale, foreign.block)}


def expanded_fp8(weight: mx.array, scale: mx.array, block: tuple[int, int]) -> mx.array:
    """Return bfloat16 weights [..., M, N] from fp8 bytes, with one scale in all, per row, or per block.

    Same arithmetic as mlx-lm's models. Raise ValueError for scales of the wrong shape.
    """
    plain = mx.from_fp8(weight, dtype=mx.bfloat16)
    *_, rows, columns = weight.shape
    blocks = (-(-rows // block[0]), -(-columns // block[1]))
    if scale.ndim < 2 or scale.shape[-2:] in ((1, 1), (rows, 1)):
        if scale.size not in (1, rows) and scale.shape[:-2] != weight.shape[:-2]:
            raise ValueError(f"scales {scale.shape} for weights {weight.shape}")
        wide = scale[:, None] if scale.ndim == 1 and scale.size > 1 else scale
        return (plain * wide).astype(mx.bfloat16)
    if scale.shape[-2:] != blocks:
        raise ValueError(f"scales {scale.shape} for weights {weight.shape} in blocks of {block[0]} by {block[1]}")
    padding = [(0, 0)] * (weight.ndim - 2) + [(0, blocks[0] * block[0] - rows), (0, blocks[1] * block[1] - columns)]
    lead = weight.shape[:-2]
    tiles = mx.pad(plain, padding).reshape(*lead, blocks[0], block[0], blocks[1], block[1])
    scaled = (tiles * scale[..., :, None, :, None]).reshape(*lead, blocks[0] * block[0], blocks[1] * block[1])
    return scaled[..., :rows, :columns].astype(mx.bfloat16)


def _packed(base: str, packed: mx.array, weights: Mapping[str, mx.array], foreign: Foreign) -> Weights:
    """Convert compressed-tensors, which packs like MLX; without stored zero points the middle of the range is zero."""
    weight, scales = packed.view(mx.uint32), weights[f"{base}.weight_scale"]
    columns = weight.shape[-1] * 32 // foreign.bits
    zeros = weights.get(f"{base}.weight_zero_point")
    if zeros is None:
        biases = -(1 << (foreign.bits - 1)) * scales
    else:
        biases = -_unpacked(zeros.view(mx.uint32), foreign.bits, -2).astype(mx.float32) * scales
    return _affine(base, weight, scales, biases.astype(scales.dtype), columns, foreign)


def _mxfp4(base: str, packed: mx.array, weights: Mapping[str, mx.array], foreign: Foreign) -> Weights:
    return {f"{base}.weight": packed.view(mx.uint32), f"{base}.scales": weights[f"{base}.weight_scale"]}


def _awq(base: str, packed: mx.array, weights: Mapping[str, mx.array], foreign: Foreign) -> Weights:
    """Convert AWQ weights: [in, out / 8] words of eight 4-bit values in AWQ's own order."""
    columns = packed.shape[0]
    values = _unpacked(packed.view(mx.uint32), 4, -1, _AWQ_ORDER).T
    words = values.reshape(values.shape[0], columns // 8, 8) << (mx.arange(8, dtype=mx.uint32) * 4)
    scales = mx.contiguous(weights[f"{base}.scales"].T)
    zeros = weights.get(f"{base}.qzeros")
    offsets = 8 if zeros is None else _unpacked(zeros.view(mx.uint32), 4, -1, _AWQ_ORDER).T.astype(mx.float32)
    biases = -offsets * scales
    return _affine(base, words.sum(axis=-1).astype(mx.uint32), scales, biases.astype(scales.dtype), columns, foreign)


def _gptq(base: str, packed: mx.array, weights: Mapping[str, mx.array], foreign: Foreign) -> Weights:
    """Convert GPTQ weights: [in / 8, out] words, the transpose of MLX's."""
    weight = mx.contiguous(packed.view(mx.uint32).T)
    scales = mx.contiguous(weights[f"{base}.scales"].T)
    zeros = _unpacked(weights[f"{base}.qzeros"].view(mx.uint32), foreign.bits, -1).T + foreign.zero_offset
    biases = -(zeros & ((1 << foreign.bits) - 1)).astype(mx.float32) * scales
    columns = weight.shape[-1] * 32 // foreign.bits
    return _affine(base, weight, scales, biases.astype(scales.dtype), columns, foreign)


def _unpacked(words: mx.array, bits: int, axis: int, order: tuple[int, ...] | None = None) -> mx.array:
    """Return the integers of `bits` bits packed in words along `axis`: lowest bits first, or at the places in `order`.

    Values of 3 bits may span two words.
    """
    places = mx.array(order or tuple(range(32 // bits)), dtype=mx.uint32) * bits
    turned = words if axis == -1 else words.swapaxes(-1, axis)
    if 32 % bits:
        each = (turned[..., None] >> mx.arange(32, dtype=mx.uint32)) & 1
        values = (each.reshape(*turned.shape[:-1], -1, bits) << mx.arange(bits, dtype=mx.uint32)).sum(axis=-1)
        values = values.astype(mx.uint32)
    else:
        values = ((turned[..., None] >> places) & ((1 << bits) - 1)).reshape(*turned.shape[:-1], -1)
    return values if axis == -1 else values.swapaxes(-1, axis)


def _affine(base: str, weight: mx.array, scales: mx.array, biases: mx.array, columns: int, foreign: Foreign) -> Weights:
    """Return the parameters of a packed matrix, with groups larger than MLX's split. Raise ValueError for unfitting
    shapes."""
    groups = columns // foreign.group_size
    if scales.shape != biases.shape or scales.shape[:-1] != weight.shape[:-1] or groups % scales.shape[-1]:
        raise ValueError(f"scales {scales.shape}, zero points {biases.shape}, weights {weight.shape}")
    if groups > scales.shape[-1]:
        scales, biases = (mx.repeat(array, groups // scales.shape[-1], axis=-1) for array in (scales, biases))
    return {f"{base}.weight": weight, f"{base}.scales": scales, f"{base}.biases": biases}


_CONVERTERS: dict[str, tuple[str, Callable[[str, mx.array, Mapping[str, mx.array], Foreign], Weights]]] = {
    "fp8": (".weight", _fp8),
    "packed": (".weight_packed", _packed),
    "packed-mxfp4": (".weight_packed", _mxfp4),
    "awq": (".qweight", _awq),
    "gptq": (".qweight", _gptq),
}
