"""Digests of arrays, to check that two ranks hold equal bits without transferring the arrays."""

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
    """Return a lazy uint32 scalar: the digest of an array's bits and positions, a sum with odd weights modulo 2^32.

    Integer sums do not depend on their order, so neither does the digest. A single changed element always shows, as its
    weight is odd, hence invertible.
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
    """Combine digests, in this order, into one number; wait for them."""
    return reduce(lambda total, one: (total * 31 + cast(int, one.item())) % _MODULUS, digests, 7)
