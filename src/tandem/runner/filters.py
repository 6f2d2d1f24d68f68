"""Sampling filters (top-k, top-p, min-p) and the random draw: vectorised over rows, inside the graph.

Every filter is a lower bound on the row's scaled logits: tokens with logits at or above it stay. Ties with the last kept
token are therefore kept (as in vLLM's and Hugging Face's top-k), independent of sort order. Filters apply in the order top-k,
top-p (over the tokens left by top-k), min-p.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import mlx.core as mx
import numpy as np
import numpy.typing as npt

HEAD = 1024
"""Number of most likely tokens that top-p sorts first. Finding them costs a thirtieth of sorting the vocabulary."""
BLOCK = 128
"""Tokens in a block of the two-stage draw."""
INFINITY = 0x7F800000
"""Bits of float32 infinity."""

_GAMMA = np.uint64(0x9E3779B97F4A7C15)

TopP = Literal["head", "sort", "halve"]
"""Method for the top-p bound. `head`: from the most likely tokens, with a sort only if these do not decide (cheap on a CPU).
`sort`: sort the vocabulary. `halve`: bisection (`_nucleus`)."""


@dataclass(frozen=True)
class FilterRows:
    """Filters of n rows; None where no row uses one."""

    top_k: mx.array | None = None
    """int32 [n, 1], 1 to vocabulary size; the vocabulary size where unused."""
    largest_k: int = 0
    """Largest top_k among the rows that use it."""
    all_k: bool = False
    """True if every row with top_p also uses top_k."""
    top_p: mx.array | None = None
    """float32 [n, 1]; 1 where unused."""
    min_p: mx.array | None = None
    """float32 [n, 1]; 0 where unused."""


def filtered_weights(scaled: mx.array, filters: FilterRows, *, top_p: TopP) -> mx.array:
    """Return unnormalised probabilities float32 [n, V] of scaled logits [n, V] whose maximum is 0 in every row.

    Filtered tokens have weight 0; the most likely token always has weight 1.
    """
    weights = mx.exp(scaled)
    bound = None
    if filters.top_k is not None or filters.top_p is not None:
        bound = _rank_bound(scaled, weights, filters, top_p)
    if filters.min_p is not None:
        least = mx.log(filters.min_p)
        bound = least if bound is None else mx.maximum(bound, least)
    return weights if bound is None else mx.where(scaled >= mx.minimum(bound, 0.0), weights, 0.0)


def _rank_bound(scaled: mx.array, weights: mx.array, filters: FilterRows, top_p: TopP) -> mx.array:
    """Return the bound [n, 1] of top-k and top-p, from the most likely tokens alone if they decide it."""
    vocab = scaled.shape[1]
    if filters.top_p is None or filters.all_k:
        return _head_bound(scaled, weights, filters, filters.largest_k)[0]
    if top_p == "halve":
        if filters.top_k is None:
            return _nucleus(scaled, weights, filters.top_p)
        kth = _head_bound(scaled, weights, replace(filters, top_p=None), filters.largest_k)[0]
        return mx.maximum(kth, _nucleus(scaled, mx.where(scaled >= kth, weights, 0.0), filters.top_p))
    if top_p == "head" and max(HEAD, filters.largest_k) < vocab:
        bound, decided = _head_bound(scaled, weights, filters, max(HEAD, filters.largest_k))
        if mx.all(decided).item():
            return bound
    return _head_bound(scaled, weights, filters, vocab)[0]


def _head_bound(scaled: mx.array, weights: mx.array, filters: FilterRows, head: int) -> tuple[mx.array, mx.array]:
    """Return the bound [n, 1] from the `head` most likely tokens (at least largest_k), and bool [n, 1]: True if they decide
    it."""
    vocab = scaled.shape[1]
    top = scaled if head == vocab else largest(scaled, head)[0]
    top = mx.sort(top, axis=-1)  # ascending: the most likely token is last
    bound = mx.full((scaled.shape[0], 1), -mx.inf)
    if filters.top_k is not None:
        kth = mx.take_along_axis(top, mx.maximum(head - filters.top_k, 0), axis=-1)
        bound = mx.where(filters.top_k < vocab, kth, bound)
    if filters.top_p is None:
        return bound, mx.array(True)
    if filters.top_k is not None:
        weights = mx.where(scaled >= bound, weights, 0.0)
    needed = filters.top_p * weights.sum(axis=-1, keepdims=True)
    kept = mx.where(top >= bound, mx.exp(top), 0.0)
    more_likely = mx.cumsum(kept, axis=-1, reverse=True, inclusive=False)
    # Keep tokens while those before them have not reached p. The first of a row always stays.
    dropped = (more_likely >= needed).sum(axis=-1, keepdims=True)
    nucleus = mx.take_along_axis(top, mx.minimum(dropped, head - 1), axis=-1)
    nucleus = mx.where(filters.top_p < 1.0, nucleus, -mx.inf)
    # Undecided: the head's mass is below p, and top-k does not exclude later tokens either.
    decided = (dropped > 0) | (top[:, :1] <= bound) | (filters.top_p >= 1.0)
    return mx.maximum(bound, nucleus), decided


def _nucleus(scaled: mx.array, weights: mx.array, top_p: mx.array) -> mx.array:
    """Return the largest top-p bound [n, 1] that keeps mass p, without a sort.

    Logits are at most 0, so the bits of their magnitudes rise as they fall. The bound's bits are found one by one from the
    mass above each candidate. These 31 passes over the rows are faster on a GPU than a sort.
    """
    bits = mx.abs(scaled).view(mx.uint32)
    needed = top_p * weights.sum(axis=-1, keepdims=True)
    found = mx.zeros(needed.shape, dtype=mx.uint32)
    for place in reversed(range(31)):
        tried = found | mx.array(1 << place, dtype=mx.uint32)
        found = mx.where(_mass_above(bits, weights, tried) < needed, tried, found)
    # With rounding errors sums may never reach p; then all tokens stay.
    bound = -mx.minimum(found, mx.array(INFINITY, dtype=mx.uint32)).view(mx.float32)
    return mx.where(top_p < 1.0, bound, -mx.inf)


@mx.compile
def _mass_above(bits: mx.array, weights: mx.array, bound: mx.array) -> mx.array:
    """Return the sum [n, 1] of weights [n, V] whose magnitude bits are below the bound's [n, 1]."""
    return mx.where(bits < bound, weights, 0.0).sum(axis=-1, keepdims=True)


def largest(values: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the k largest values of each row of float32 [n, m], unordered, and their indices int32: both [n, k].

    They lie in the k blocks with the largest maxima, so one cheap pass leaves little to partition.
    """
    rows, width = values.shape
    block = 2 ** int(math.log2(min(max(math.sqrt(width / k), 16), 64)))
    blocks = -(-width // block)
    if blocks <= k:
        return _partitioned(values, k)
    if width % block:
        values = mx.pad(values, [(0, 0), (0, blocks * block - width)], constant_values=-mx.inf)
    values = values.reshape(rows * blocks, block)
    _, chosen = _partitioned(values.max(axis=-1).reshape(rows, blocks), k)
    first = mx.arange(rows, dtype=mx.int32)[:, None] * blocks
    best, places = _partitioned(values[first + chosen].reshape(rows, k * block), k)
    return best, mx.take_along_axis(chosen, places // block, axis=-1) * block + places % block


def _partitioned(values: mx.array, k: int) -> tuple[mx.array, mx.array]:
    """Return the same as `largest`, by partition alone."""
    width = values.shape[1]
    places = mx.argpartition(values, width - k, axis=-1)[:, width - k :]
    return mx.take_along_axis(values, places, axis=-1), places.astype(mx.int32)


def draw(weights: mx.array, uniforms: mx.array) -> mx.array:
    """Draw one index per row, int32 [n], in proportion to float32 weights [n, V] >= 0.

    Two-stage inverse CDF: a block of tokens, then a token in it, each with its own number from `uniforms` float32 [n, 2].
    Sums stay short, so float32 neither loses the tail of a large vocabulary nor rounds past its end. A drawn token has
    positive weight if any token has.
    """
    rows, vocab = weights.shape
    blocks = -(-vocab // BLOCK)
    if vocab % BLOCK:
        weights = mx.pad(weights, [(0, 0), (0, blocks * BLOCK - vocab)])
    weights = weights.reshape(rows, blocks, BLOCK)
    block = _pick(weights.sum(axis=-1), uniforms[:, :1])
    within = mx.take_along_axis(weights, block[:, :, None], axis=1)[:, 0]
    return (block * BLOCK + _pick(within, uniforms[:, 1:])).astype(mx.int32)[:, 0]


def _pick(weights: mx.array, uniform: mx.array) -> mx.array:
    """Return the index [n, 1] of the first weight [n, m] whose running sum exceeds uniform [n, 1] times the total."""
    running = mx.cumsum(weights, axis=-1)
    # Parallel scans may not be monotonic, so limit the target to the largest sum reached by a real token.
    reached = mx.where(weights > 0, running, 0.0)
    hit = reached > uniform * reached.max(axis=-1, keepdims=True)
    return mx.argmax(hit, axis=-1, keepdims=True)


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply SplitMix64's output function (a bijection of uint64) elementwise: Steele, Lea, Flood, "Fast splittable
    pseudorandom number generators".

    Random numbers are indexed, not iterated: a function of seed and position alone. So a sequence's text is equal in any
    batch, on any rank, and after a replay.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def seed_keys(seeds: list[int]) -> npt.NDArray[np.uint64]:
    """Return uint64 [n] keys of 64-bit seeds, mixed so that neighbouring seeds give unrelated sequences."""
    return mixed(np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64) + _GAMMA)


def uniform_pairs(keys: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float32]:
    """Return float32 [n, 2] in [0, 1), 24 bits each: two independent numbers per row, for its token at `positions`."""
    bits = mixed(keys + (positions + np.uint64(1)) * _GAMMA)
    parts = np.stack([bits >> np.uint64(40), (bits >> np.uint64(8)) & np.uint64(0xFFFFFF)], axis=1)
    return parts.astype(np.float32) * np.float32(2.0**-24)
