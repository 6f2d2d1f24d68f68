"""The seam for attention: a cache that can attend by itself does, for every family of mlx-lm (mlx)."""

from __future__ import annotations

import sys
from typing import Any

import mlx.core as mx
from mlx_lm.models import base

from tandem.loading import quantized_kv
from tandem.loading.quantized_kv import Quantized

_of_mlx_lm = base.scaled_dot_product_attention


def _attend(queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any,
            sinks: mx.array | None = None) -> mx.array:
    """As mlx-lm's function, whose place it takes: queries [B, heads, L, D], keys and values [B, kv_heads, S, D], or
    quantised ones, which say so."""
    own = getattr(cache, "attend", None)
    out = own(queries, keys, values, scale=scale, mask=mask, sinks=sinks) if own is not None else None
    if out is not None:
        return out
    if isinstance(keys, Quantized):
        return quantized_kv.attend(queries, keys, values, scale=scale, mask=mask, sinks=sinks)
    return _of_mlx_lm(queries, keys, values, cache, scale, mask, sinks)


def let_caches_attend() -> None:
    """Put the seam into mlx-lm's models, those that are imported and those that will be. Idempotent."""
    base.scaled_dot_product_attention = _attend
    for name, module in list(sys.modules.items()):
        if name.startswith("mlx_lm.models.") and getattr(module, "scaled_dot_product_attention", None) is _of_mlx_lm:
            module.__dict__["scaled_dot_product_attention"] = _attend
