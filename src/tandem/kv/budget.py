"""How many KV positions the batches of a rank group occupy, and whether more would fit."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from tandem.protocol.step import KVShape

GROWTH = 256
"""Positions by which rows grow: one buffer copy in 256 steps costs less than 1 % of reading it each step."""
WASTE = 16
"""Divisor of the KV positions that a full batch may lose to rounding up its rows."""


def rounded(length: int, step: int) -> int:
    """`length` rounded up to a multiple of `step`."""
    return -(-length // step) * step


def growth_step(kv_tokens: int, max_batch_size: int) -> int:
    """Positions by which rows grow, fewer when memory is short."""
    return min(max(kv_tokens // max(max_batch_size * WASTE, 1), 1), GROWTH)


def batch_positions(lengths: Iterable[int], step: int = 1) -> int:
    """Positions that a decode batch needs: its rows are as long as the longest of them, rounded up to `step`."""
    rows = list(lengths)
    return len(rows) * rounded(max(rows, default=0), step)


def most_rows(max_batch_size: int, micro_batches: int) -> int:
    """Most sequences of one micro-batch."""
    return -(-max_batch_size // micro_batches)


def held_sequences(max_batch_size: int, micro_batches: int) -> int:
    """Most sequences whose states and windows all micro-batches hold together: full buffers, and a prompt beside each."""
    return micro_batches * (most_rows(max_batch_size, micro_batches) + 1)


def kv_shape(held: KVShape, rows: int, longest: int, *, most: int = sys.maxsize, room: int = sys.maxsize) -> KVShape:
    """Capacity of a KV buffer for `rows` rows of up to `longest` positions, from the capacity that it has.

    Rows grow by half, up to `most`, and positions to a multiple of `GROWTH`, as far as `room` positions allow: what is
    needed is there however little room there is. Given back when half of the buffer is idle.
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
    """KV positions that fit on one machine.

    `memory_bytes` is the machine's memory, `fraction` the share that may be used, and `ranks` gives (weight bytes,
    KV bytes per position) of each rank on it. `kept` bytes of buffers must have room in what the share leaves over.
    At least 0.
    """
    parts = list(ranks)
    free = min(int(memory_bytes * fraction), memory_bytes - kept) - sum(weights for weights, _ in parts)
    per_position = sum(per_token for _, per_token in parts)
    return max(free, 0) // max(per_position, 1)
