"""Why a layout won or lost, in words. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.planner.hardware import Machine
from tandem.planner.types import Candidate, Goal, MachineMemory, Prediction

TOLERANCE: dict[Goal, float] = {"latency": 0.05, "throughput": 0.02, "capacity": 0.02}
"""Advantages below this are less than the estimates are worth: the layout with fewer machines is taken."""
_MUCH = 0.25
"""Share of a step from which the network counts as the reason."""


def gib(count: float) -> str:
    """Bytes as GiB, or MiB when few."""
    return f"{count / 2**30:.1f} GiB" if abs(count) >= 2**30 / 2 else f"{count / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """A time in the unit that suits it."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def rate(value: float) -> str:
    """Tokens a second."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def shortage(candidate: Candidate, machines: Sequence[Machine]) -> str:
    """`does not fit: b short of 3.2 GiB (needs 57.6 GiB of 54.4 GiB)`."""
    memory = candidate.prediction.memory if candidate.prediction else ()
    short = [m for m in memory if m.short]
    parts = [
        f"{machines[m.machine].name} short of {gib(m.short)} (needs {gib(m.needed)} of {gib(m.budget)})"
        for m in sorted(short, key=lambda m: -m.short)[:2]
    ]
    more = f" and {len(short) - 2} more" if len(short) > 2 else ""
    return f"does not fit: {', '.join(parts)}{more}"


def why_won(
    chosen: Candidate, fitting: Sequence[Candidate], machines: Sequence[Machine], goal: Goal, streams: int
) -> tuple[str, ...]:
    """Sentences about the layout that was chosen."""
    found = chosen.prediction
    assert found is not None
    measure = {
        "latency": f"one stream gets {rate(found.tokens_single)} tokens/s ({seconds(found.step_single)} a token)",
        "throughput": f"{streams} streams get {rate(found.tokens)} tokens/s together",
        "capacity": f"{found.capacity:,} KV tokens fit",
    }[goal]
    rank = "as asked for" if chosen.manual else _rank(chosen, fitting, goal)
    lines = [f"{chosen.label}, {rank}: {measure}."]
    if found.collectives:
        lines.append(
            f"Of each token's {seconds(found.step_single)}, {seconds(found.communication)} are communication: "
            f"{found.collectives} all-reduces of {seconds(found.collective)} a step."
        )
    lines.append(_fullest(found.memory, machines))
    return tuple(lines)


def _rank(chosen: Candidate, fitting: Sequence[Candidate], goal: Goal) -> str:
    words = {"latency": "lowest latency", "throughput": "highest throughput", "capacity": "largest capacity"}[goal]
    if len(fitting) == 1:
        return "the only layout that fits"
    best = max(fitting, key=lambda c: advantage(c, chosen, goal))
    ahead = advantage(best, chosen, goal) - 1
    if best is chosen or ahead < 0.0005:
        return f"{words} of {len(fitting)} layouts that fit"
    return f"within {ahead:.1%} of the {words} of {len(fitting)} layouts that fit ({best.label}), and simpler"


def _fullest(memory: Sequence[MachineMemory], machines: Sequence[Machine]) -> str:
    full = max(memory, key=lambda m: m.needed / m.budget)
    return (
        f"Fullest machine: {machines[full.machine].name} with {gib(full.needed)} of {gib(full.budget)} "
        f"(weights {gib(full.weights)}, KV {gib(full.kv)}, headroom {gib(full.headroom)})."
    )


def why_lost(candidate: Candidate, chosen: Candidate, goal: Goal) -> str:
    """Why a layout that fits was not chosen."""
    loser, winner = candidate.prediction, chosen.prediction
    assert loser is not None
    assert winner is not None
    behind = advantage(chosen, candidate, goal)
    if behind < 1 + TOLERANCE[goal]:
        more = _machines(candidate) - _machines(chosen)
        using = f" with {more} more machine{'s' if more > 1 else ''}" if more > 0 else ""
        return f"about the same: {_compare(behind)}{using}"
    if goal == "capacity":
        return f"holds fewer tokens: {loser.capacity:,} against {winner.capacity:,}"
    if goal == "throughput":
        return f"fewer tokens: {rate(loser.tokens)} against {rate(winner.tokens)} tokens/s{_cause(candidate, loser)}"
    times = f"{seconds(loser.step_single)} against {seconds(winner.step_single)} a token"
    return f"slower: {times}{_cause(candidate, loser)}"


def _cause(candidate: Candidate, loser: Prediction) -> str:
    """What holds a layout back, from its shape and its time on the network."""
    layout = candidate.layout
    assert layout is not None
    stages = layout.replicas[0]
    if loser.collectives and loser.communication > _MUCH * loser.step_single:
        return (
            f"; {loser.collectives} all-reduces of {seconds(loser.collective)} a step take "
            f"{loser.communication / loser.step_single:.0%} of it"
        )
    if len(layout.replicas) > 1 and len(stages) == 1 and len(stages[0].machines) == 1:
        return "; each stream is answered by one machine alone"
    if len(stages) > 1:
        return "; the stages work on a token in turn"
    if len(layout.machines) == 1:
        return "; one machine reads all weights for every token"
    heads = stages[0].kv_heads
    if len(set(heads)) > 1 and len(set(stages[0].shares)) > 1:
        return f"; unequal shares, kv heads {'+'.join(map(str, heads))}: all wait for the slowest"
    return ""


def _compare(behind: float) -> str:
    gap = abs(behind - 1)
    return "equal" if gap < 0.0005 else f"{gap:.1%} {'worse' if behind > 1 else 'better'}"


def _machines(candidate: Candidate) -> int:
    return len(candidate.layout.machines) if candidate.layout else 0


def advantage(a: Candidate, b: Candidate, goal: Goal) -> float:
    """How many times better `a` is than `b`."""
    assert a.prediction is not None
    assert b.prediction is not None
    if goal == "latency":
        return b.prediction.step_single / a.prediction.step_single
    if goal == "throughput":
        return a.prediction.tokens / b.prediction.tokens
    return (a.prediction.capacity + 1) / (b.prediction.capacity + 1)
