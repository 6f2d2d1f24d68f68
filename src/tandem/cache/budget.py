"""How many KV positions the batches of a gang occupy, and whether more would fit."""

from __future__ import annotations

from collections.abc import Iterable


def batch_positions(lengths: Iterable[int]) -> int:
    """Positions that a decode batch occupies: its rows are as long as the longest of them."""
    rows = list(lengths)
    return len(rows) * max(rows, default=0)


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
