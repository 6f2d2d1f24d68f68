"""Digests of arrays, to tell whether two ranks hold the same bits without sending the arrays about."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache, reduce
from typing import cast

import mlx.core as mx

_SPREAD = 2654435761
"""Knuth's multiplicative constant: neighbouring positions get unrelated weights."""
_MODULUS = 2**32
_KEPT = 2**16
"""Elements whose weights are cached (256 KiB), enough for a decode step of most layouts."""


def digest(array: mx.array) -> mx.array:
    """uint32 scalar (lazy) of an array's bits and their places: a sum with odd weights modulo 2^32.

    Integers add up alike in any order, so that the digest does not depend on how a device sums. One changed element
    always shows: its weight is odd, hence invertible.
    """
    bits = array.reshape(-1).view(mx.uint32 if array.dtype.size == 4 else mx.uint16).astype(mx.uint32)
    return (bits * (_kept()[: bits.size] if bits.size <= _KEPT else _weights(bits.size))).sum()


def _weights(size: int) -> mx.array:
    return mx.arange(size, dtype=mx.uint32) * mx.array(_SPREAD, dtype=mx.uint32) | mx.array(1, dtype=mx.uint32)


@cache
def _kept() -> mx.array:
    weights = _weights(_KEPT)
    mx.eval(weights)
    return weights


def chained(digests: Iterable[mx.array]) -> int:
    """One number for digests in this order; waits for them."""
    return reduce(lambda total, one: (total * 31 + cast(int, one.item())) % _MODULUS, digests, 7)
