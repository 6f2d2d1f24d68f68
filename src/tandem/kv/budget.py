"""KV positions that the batches of a rank group occupy, and capacities of KV buffers."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tandem.protocol.step import KVShape

GROWTH = 256
"""Positions by which rows grow. One buffer copy in 256 steps costs under 1 % of reading it in each step."""
WASTE = 16
"""Divisor of the KV positions that a full batch may waste by rounding up its rows."""


def rounded(length: int, step: int) -> int:
    """Return `length` rounded up to a multiple of `step`."""
    return -(-length // step) * step


def growth_step(kv_tokens: int, max_batch_size: int) -> int:
    """Return the positions by which rows grow; fewer than `GROWTH` if memory is short."""
    return min(max(kv_tokens // max(max_batch_size * WASTE, 1), 1), GROWTH)


def batch_positions(lengths: Iterable[int], step: int = 1) -> int:
    """Return the KV positions of a decode batch: rows x longest length, rounded up to `step`."""
    rows = list(lengths)
    return len(rows) * rounded(max(rows, default=0), step)


def most_rows(max_batch_size: int, micro_batches: int) -> int:
    """Return the maximum sequences of one micro-batch."""
    return -(-max_batch_size // micro_batches)


def held_sequences(max_batch_size: int, micro_batches: int) -> int:
    """Return the maximum sequences with states or windows in memory: all rows, and a prompt per micro-batch."""
    return micro_batches * (most_rows(max_batch_size, micro_batches) + 1)


def kv_shape(held: KVShape, rows: int, longest: int, *, most: int = sys.maxsize, room: int = sys.maxsize) -> KVShape:
    """Return the capacity of a KV buffer for `rows` rows of up to `longest` positions, given its current capacity.

    Rows grow by half, up to `most`, and positions to a multiple of `GROWTH`, within `room` positions. The need is always met,
    even beyond `room`. The buffer shrinks when half of it is idle.
    """
    if not rows:
        return KVShape()
    whole = rounded(longest, GROWTH)
    spare = held.rows if rows <= held.rows else max(rows, min(held.rows + held.rows // 2, most))
    positions = held.positions if longest <= held.positions else whole
    if 2 * rows * whole <= spare * positions:
        spare, positions = min(spare, rows + rows // 3), whole
    if (spare, positions) == held:
        return held
    positions = max(longest, min(positions, room // rows))
    return KVShape(max(rows, min(spare, room // positions)), positions)


def kv_capacity(memory_bytes: int, fraction: float, ranks: Iterable[tuple[int, int]], *, kept: int = 0) -> int:
    """Return the KV positions that fit on one device, at least 0.

    `memory_bytes`: memory of the device; `fraction`: usable share of it; `ranks`: (fixed bytes, bytes per KV position) of
    each rank on it. `kept`: bytes of cached buffers, which must fit beside.
    """
    parts = list(ranks)
    free = min(int(memory_bytes * fraction), memory_bytes - kept) - sum(weights for weights, _ in parts)
    per_position = sum(per_token for _, per_token in parts)
    return max(free, 0) // max(per_position, 1)
