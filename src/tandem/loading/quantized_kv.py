"""Quantised KV cache of one sequence in MLX's affine groups, and attention over it (mlx).

Keys are quantised when computed, and attention always reads them quantised, even a position's own. Results therefore do
not depend on how a prompt is cut into chunks, nor on prefill or decode. Replay, cached prefixes and preemption yield
the same output as an undisturbed run.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from tandem.errors import UnsupportedModel
from tandem.loading.memory import on_cuda
from tandem.models.kv_types import group_for, group_size

PRODUCTS = 32
"""Most queries per kv head to multiply with quantised keys directly; with more it is faster to dequantise once."""


class Cache(Protocol):
    """Common interface of mlx-lm's and Tandem's caches of one layer; kinds are distinguished by exact type."""

    state: Any
    """Arrays of the cache, nested according to its kind."""

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays in `state`."""


class Groups(NamedTuple):
    """Format of quantised numbers: bits of each, and numbers per scale and bias."""

    bits: int
    size: int


class Quantized(NamedTuple):
    """Keys or values [rows, kv_heads, positions, head_dim] in groups, as `mx.quantize` returns them."""

    codes: mx.array
    """uint32 [rows, kv_heads, positions, head_dim * bits / 32]."""
    scales: mx.array
    """[rows, kv_heads, positions, head_dim / size], in the type of computation, as `biases`."""
    biases: mx.array
    groups: Groups

    @property
    def parts(self) -> tuple[mx.array, mx.array, mx.array]:
        """`codes`, `scales` and `biases`."""
        return self.codes, self.scales, self.biases

    def expanded(self) -> mx.array:
        """Return the dequantised numbers, in the type of computation."""
        return mx.dequantize(*self.parts, group_size=self.groups.size, bits=self.groups.bits)


def quantized(array: mx.array, groups: Groups) -> Quantized:
    """Quantise along the last axis, whose length is a multiple of the group size."""
    codes, scales, biases = mx.quantize(array, group_size=groups.size, bits=groups.bits)
    return Quantized(codes, scales, biases, groups)


class GroupedKVCache(QuantizedKVCache):
    """mlx-lm's quantised cache of one sequence, with keys and values returned as `Quantized`."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(group_size=groups.size, bits=groups.bits)

    @property
    def groups(self) -> Groups:
        """Bits and group size of the cache."""
        return Groups(self.bits, self.group_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Quantized, Quantized]:
        """Append keys and values [1, kv_heads, positions, head_dim]; return those of all positions."""
        [kept_keys, kept_values] = super().update_and_fetch(keys, values)
        return Quantized._make((*kept_keys, self.groups)), Quantized._make((*kept_values, self.groups))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays; 0 before the first call, where mlx-lm's property fails."""
        return 0 if self.empty() else int(super().nbytes)


def groups_for(cache: Cache, bits: int) -> Groups | None:
    """Return the format for a layer's keys and values, given its cache after a call; None if they cannot be quantised."""
    if not bits or not isinstance(cache, KVCache) or cache.keys is None:
        return None
    size = group_size((cache.keys.shape[-1], cache.values.shape[-1]))
    return Groups(bits, group_for(bits, size)) if size else None


def require_products(groups: Groups) -> None:
    """Raise UnsupportedModel if MLX cannot multiply with quantised keys and values on this device."""
    keys = quantized(mx.zeros((1, 1, 2, groups.size)), groups)
    try:
        mx.eval(attend(mx.zeros((1, 2, 1, groups.size)), keys, keys, scale=1.0, mask=None, sinks=None))
    except RuntimeError as error:
        raise UnsupportedModel(
            f"--kv-dtype {groups.bits}bit: MLX cannot compute with quantised keys and values on "
            f"this device ({error}); leave it out",
            param="kv_dtype",
        ) from error


def attend(
    queries: mx.array, keys: Quantized, values: Quantized, *, scale: float, mask: mx.array | str | None, sinks: mx.array | None
) -> mx.array:
    """Return the attention of queries [rows, heads, width, head_dim], as `mx.fast.scaled_dot_product_attention` does."""
    rows, heads, width, _ = queries.shape
    kv_heads, positions = keys.codes.shape[1:3]
    sharing = heads // kv_heads
    # MLX's CUDA products accept no strided arrays, which caches return, and are far slower otherwise.
    if sharing * width > PRODUCTS or on_cuda():
        return mx.fast.scaled_dot_product_attention(
            queries, keys.expanded(), values.expanded(), scale=scale, mask=mask, sinks=sinks
        )
    # All queries of a kv head form one product, so that keys are read once.
    together = (queries * scale).reshape(rows, kv_heads, sharing * width, -1)
    scores = _product(together, keys, transpose=True)
    scores = _masked(scores.reshape(rows, kv_heads, sharing, width, positions), mask)
    if sinks is not None:
        column = mx.broadcast_to(sinks.astype(scores.dtype).reshape(1, kv_heads, sharing, 1, 1), (*scores.shape[:4], 1))
        scores = mx.concatenate([column, scores], axis=-1)
    weights = mx.softmax(scores, axis=-1, precise=True)
    weights = (weights[..., 1:] if sinks is not None else weights).reshape(rows, kv_heads, sharing * width, positions)
    return _product(weights, values, transpose=False).reshape(rows, heads, width, -1)


def _product(left: mx.array, right: Quantized, *, transpose: bool) -> mx.array:
    bits, size = right.groups
    return mx.quantized_matmul(left, *right.parts, transpose=transpose, group_size=size, bits=bits)


def _masked(scores: mx.array, mask: mx.array | str | None) -> mx.array:
    """Apply an attention mask (`causal`, boolean or additive) to scores [rows, kv_heads, sharing, width, positions]."""
    if mask is None:
        return scores
    kv_heads, sharing, width, positions = scores.shape[1:]
    if isinstance(mask, str):  # causal
        mask = mx.arange(positions - width, positions)[:, None] >= mx.arange(positions)
    if mask.ndim > 2 and mask.shape[-3] > 1:
        mask = mask.reshape(*mask.shape[:-3], kv_heads, sharing, *mask.shape[-2:])
    elif mask.ndim > 2:
        mask = mx.expand_dims(mask, -3)
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, mx.finfo(scores.dtype).min)
    masked: mx.array = scores + mask.astype(scores.dtype)
    return masked
