"""Which layers on which stage and which kv heads on which rank, at least cost. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

INFEASIBLE = float("inf")


def share_heads(
    heads: int, ranks: int, cost: Callable[[int, int], float], fits: Callable[[int, int], bool]
) -> tuple[int, ...] | None:
    """Kv heads of each rank, at least one, so that the costliest rank costs least; None if memory does not allow it.

    `cost(rank, heads)` and the memory behind `fits(rank, heads)` grow with the heads, so it is optimal to give each
    next head to the rank that is cheapest with it.
    """
    counts = [1] * ranks
    if ranks > heads or not all(fits(rank, 1) for rank in range(ranks)):
        return None
    if ranks == 1:
        return (heads,) if fits(0, heads) else None
    for _ in range(heads - ranks):
        options = [(cost(rank, counts[rank] + 1), rank) for rank in range(ranks) if fits(rank, counts[rank] + 1)]
        if not options:
            return None
        counts[min(options)[1]] += 1
    return tuple(counts)


def split(
    stages: int, layers: int, cost: Callable[[int, int, int], float], combine: Literal["sum", "max"],
    uncut: frozenset[int] = frozenset(),
) -> tuple[tuple[int, int], ...] | None:
    """(start, stop) of each stage, contiguous and at least one layer each, with the least sum or maximum of costs.

    `cost(stage, start, stop)` is INFEASIBLE where the range does not fit, and stays so as the range grows. No stage
    starts in `uncut`. Dynamic programming over (stages placed, layers placed); exact. None if no split is feasible.
    """
    if stages > layers:
        return None
    best: dict[int, tuple[float, float, tuple[tuple[int, int], ...]]] = {0: (-INFEASIBLE, 0.0, ())}
    for stage in range(stages):
        later = stages - stage - 1
        placed: dict[int, tuple[float, float, tuple[tuple[int, int], ...]]] = {}
        for start, (worst, total, ranges) in best.items():
            for stop in range(start + 1, layers - later + 1) if later else (layers,):
                if stop in uncut:
                    continue
                value = cost(stage, start, stop)
                if value == INFEASIBLE:
                    break
                entry = (max(worst, value), total + value, (*ranges, (start, stop)))
                if stop not in placed or _key(entry, combine) < _key(placed[stop], combine):
                    placed[stop] = entry
        best = placed
    return best[layers][2] if layers in best else None


def _key(entry: tuple[float, float, tuple[tuple[int, int], ...]], combine: str) -> tuple[float, float]:
    worst, total, _ = entry
    return (total, worst) if combine == "sum" else (worst, total)
