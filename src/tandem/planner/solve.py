"""Optimal split of layers and kv heads for a given arrangement of machines, and its predicted performance. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from tandem.planner.cost import Costs, RankShare
from tandem.planner.layouts import Divider, Groups
from tandem.planner.types import Goal, Layout, MachineMemory, Prediction, Stage

INFEASIBLE = float("inf")


def share_heads(
    heads: int, ranks: int, cost: Callable[[int, int], float], fits: Callable[[int, int], bool]
) -> tuple[int, ...] | None:
    """Return kv heads per rank, at least one each, with the least maximal cost; None if memory does not suffice.

    `cost(rank, heads)`, and the memory behind `fits(rank, heads)`, grow with the heads. Giving each further head to the
    rank with the lowest resulting cost is therefore optimal.
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
    stages: int,
    layers: int,
    cost: Callable[[int, int, int], float],
    combine: Literal["sum", "max"],
    uncut: frozenset[int] = frozenset(),
) -> tuple[tuple[int, int], ...] | None:
    """Return (start, stop) of each stage, contiguous and non-empty, with the least sum or maximum of costs; None if
    infeasible.

    `cost(stage, start, stop)` is INFEASIBLE if the range does not fit, as are then all longer ranges. No stage starts
    in `uncut`. Exact dynamic programming over (stages placed, layers placed).
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


@dataclass(frozen=True)
class _Objective:
    """Quantity that a split minimises, and how it is combined over stages."""

    kind: Literal["time", "capacity", "short"]
    combine: Literal["sum", "max"]
    rows: int = 1


_SHORT = _Objective("short", "max")
_SINGLE = _Objective("time", "sum")


class _Placed(NamedTuple):
    """Least-cost placement of layers on a group of machines; `stage` is None if they do not fit."""

    cost: float = INFEASIBLE
    stage: Stage | None = None


class Solver:
    """Places layers and heads by the cost model, and predicts performance. Deterministic."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.divider = Divider(costs.model, dequantize=costs.request.dequantize == "yes")
        self._layers = costs.model.num_layers
        self._heads = costs.model.num_kv_heads
        self._alike = costs.layers_alike
        self._headrooms: dict[tuple[RankShare, int, bool, bool, bool], float] = {}
        self._known: dict[tuple[tuple[int, ...], int, int, int, _Objective], _Placed] = {}

    # ---- splits

    def replica(self, groups: Groups, streams: int, goal: Goal) -> tuple[Stage, ...]:
        """Return stages over `groups` for `streams` sequences: the best split that fits, else the one with the least
        shortage."""
        found = [s for o in _objectives(goal, len(groups), streams) if (s := self._split(groups, streams, o))]
        if not found:
            return self._split(groups, streams, _SHORT) or ()
        return min(found, key=lambda stages: score(self.predict(Layout(replicas=(stages,)), streams), goal))

    def least_short(self, groups: Groups, streams: int) -> float:
        """Return the bytes missing on the worst machine in the split with the least shortage; 0 or less if it fits."""
        stages = self._split(groups, streams, _SHORT)
        if not stages:
            return INFEASIBLE
        return max(self._short(part, s.start, s.stop, streams) for s in stages for part in self._parts(s))

    def fixed(
        self, groups: Groups, streams: int, layers: Sequence[int] | None, shares: Sequence[float] | None, goal: Goal
    ) -> tuple[Stage, ...]:
        """Return stages with `layers` per stage, or `shares` of each stage's machines, as given; the rest is chosen."""
        counts = list(layers) if layers else [s.layers for s in self.replica(groups, streams, goal)]
        options = (*_objectives(goal, len(groups), streams), _SHORT)
        stages: list[Stage] = []
        for group, count in zip(groups, counts, strict=True):
            start = stages[-1].stop if stages else 0
            found = (self._stage(group, start, start + count, streams, option) for option in options)
            stage = next(stage for stage in found if stage is not None)
            if shares:
                own = tuple(x / sum(shares) for x in shares)
                stage = replace(stage, shares=own, kv_heads=self.divider.heads(own) or stage.kv_heads)
            stages.append(stage)
        return tuple(stages)

    def _split(self, groups: Groups, streams: int, objective: _Objective) -> tuple[Stage, ...] | None:
        ranges = split(
            len(groups),
            self._layers,
            lambda stage, start, stop: self._placed(groups[stage], start, stop, streams, objective).cost,
            objective.combine,
            self.costs.model.uncut,
        )
        if ranges is None:
            return None
        placed = (self._stage(g, a, b, streams, objective) for g, (a, b) in zip(groups, ranges, strict=True))
        return tuple(stage for stage in placed if stage is not None)

    def _placed(self, group: tuple[int, ...], start: int, stop: int, streams: int, objective: _Objective) -> _Placed:
        """Return the placement of layers start..stop on `group`. For equal layers, middle ranges of one length share a
        cache entry."""
        if self._alike and start and stop < self._layers:
            start, stop = 1, 1 + stop - start
        key = (group, start, stop, streams, objective)
        placed = self._known.get(key)
        if placed is None:
            options = self._options(group, start, stop, streams, objective)
            placed = self._known[key] = min(options, key=lambda p: p.cost, default=_Placed())
        return placed

    def _stage(self, group: tuple[int, ...], start: int, stop: int, streams: int, objective: _Objective
               ) -> Stage | None:  # fmt: skip
        stage = self._placed(group, start, stop, streams, objective).stage
        return None if stage is None else replace(stage, start=start, stop=stop)

    def _options(self, group: tuple[int, ...], start: int, stop: int, streams: int, objective: _Objective) -> Iterator[_Placed]:
        """Yield placements that fit: kv heads distributed greedily by cost, and shares in proportion to each machine's
        speed."""

        def cost(part: RankShare) -> float:
            return self._cost(part, start, stop, streams, objective)

        def fits(part: RankShare) -> bool:
            return objective.kind == "short" or self._short(part, start, stop, streams) <= 0

        whole_experts = len(group) > 1 and self.divider.whole_experts(len(group))
        sharing = len(group) if whole_experts else 1
        divisions: list[tuple[tuple[int, ...], tuple[float, ...]]] = []
        if len(group) == 1:
            divisions.append(((self._heads,), (1.0,)))
        elif step := self.divider.step:
            units = self._heads // step
            parts = [[RankShare(m, n / units, n / units, sharing) for n in range(units + 1)] for m in group]
            heads = share_heads(units, len(group), lambda rank, n: cost(parts[rank][n]), lambda rank, n: fits(parts[rank][n]))
            if heads:
                divisions.append((tuple(n * step for n in heads), tuple(n / units for n in heads)))
            shares = _in_proportion([cost(RankShare(m, 1.0, 1.0, sharing)) for m in group], objective)
            if own := self.divider.heads(shares):
                divisions.append((own, shares))
        for counts, shares in divisions:
            stage = Stage(machines=group, start=start, stop=stop, kv_heads=counts, shares=shares, whole_experts=whole_experts)
            ranks = self._parts(stage)
            if all(map(fits, ranks)):
                yield _Placed(max(map(cost, ranks)) + self._waiting(group, start, stop, objective), stage)

    def _cost(self, part: RankShare, start: int, stop: int, streams: int, objective: _Objective) -> float:
        if objective.kind == "time":
            return self.costs.rank_time(part, start, stop, objective.rows)
        if objective.kind == "capacity":
            return -self._capacity(part, start, stop, streams)
        return self._short(part, start, stop, streams)

    def _waiting(self, group: tuple[int, ...], start: int, stop: int, objective: _Objective) -> float:
        """Return the seconds of all-reduces, and of gathering logits, in a stage's step; 0 for other objectives."""
        if objective.kind != "time" or len(group) == 1:
            return 0.0
        seconds = 2 * (stop - start) * self.costs.all_reduce(group, objective.rows)
        return seconds + (self.costs.gather_logits(group, objective.rows) if stop == self._layers else 0.0)

    # ---- memory of a rank

    def _short(self, part: RankShare, start: int, stop: int, streams: int) -> float:
        costs = self.costs
        needed = costs.weights(part, start, stop) + costs.kv(part, start, stop, streams)
        return needed + self._headroom(part, start, stop, streams) - costs.budget(part.machine)

    def _headroom(self, part: RankShare, start: int, stop: int, streams: int) -> float:
        first, last, alone = start == 0, stop == self._layers, stop - start == 1
        key = (part, streams, first, last, alone)
        if key not in self._headrooms:
            self._headrooms[key] = self.costs.headroom(part, streams, first=first, last=last, alone=alone)
        return self._headrooms[key]

    def _memory(self, part: RankShare, start: int, stop: int, streams: int) -> MachineMemory:
        return MachineMemory(
            machine=part.machine,
            weights=int(self.costs.weights(part, start, stop)),
            kv=int(self.costs.kv(part, start, stop, streams)),
            headroom=int(self._headroom(part, start, stop, streams)),
            budget=self.costs.budget(part.machine),
            checkpoint=int(self.costs.state(part, stop - start, 1)),
        )

    def _capacity(self, part: RankShare, start: int, stop: int, streams: int) -> float:
        """Return the KV tokens that fit on a rank besides its weights."""
        free = self.costs.budget(part.machine) - self.costs.weights(part, start, stop)
        free -= self._headroom(part, start, stop, streams)
        free -= self.costs.held_states(part, stop - start, streams)
        return max(0.0, free / max(self.costs.position(part, start, stop), 1.0))

    def _parts(self, stage: Stage) -> list[RankShare]:
        ranks = zip(stage.machines, stage.shares, stage.kv_heads, strict=True)
        sharing = len(stage.machines) if stage.whole_experts else 1
        return [RankShare(machine, share, heads / self._heads, sharing) for machine, share, heads in ranks]

    # ---- predictions

    def predict(self, layout: Layout, streams: int) -> Prediction:
        """Predict performance and memory for `streams` sequences, spread evenly over the replicas."""
        replicas = layout.replicas
        each = [streams // len(replicas) + (i < streams % len(replicas)) for i in range(len(replicas))]
        reserved = max(each)
        slowest = max(replicas, key=lambda stages: self._pass(stages, 1))
        single = self._pass(slowest, 1)
        batches = [self._batch(stages, n) for stages, n in zip(replicas, each, strict=True) if n]
        prompts = [self._prompt(stages) for stages in replicas]
        network = sum(self._waiting(s.machines, s.start, s.stop, _SINGLE) for s in slowest)
        return Prediction(
            step_single=single,
            tokens_single=1 / single,
            step=max(step for step, _ in batches),
            tokens=sum(n / step for n, (step, _) in zip(each, batches, strict=False)),
            prefill=sum(self.costs.context / p for p, n in zip(prompts, each, strict=True) if n),
            first_token=max(prompts),
            capacity=sum(self._replica_capacity(stages, reserved) for stages in replicas),
            micro_batches=max(micro_batches for _, micro_batches in batches),
            collectives=sum(2 * s.layers for s in slowest if len(s.machines) > 1),
            collective=max(self.costs.all_reduce(s.machines, 1) for s in slowest),
            communication=network + self._hops(slowest, 1),
            memory=tuple(
                self._memory(part, s.start, s.stop, reserved) for stages in replicas for s in stages for part in self._parts(s)
            ),
        )

    def _stage_time(self, stage: Stage, rows: int, *, prefill: bool = False) -> float:
        """Return the seconds of a stage's step: its slowest rank, plus two all-reduces per layer."""
        slowest = max(self.costs.rank_time(p, stage.start, stage.stop, rows, prefill=prefill) for p in self._parts(stage))
        if prefill:  # only a prompt's last token passes through the head
            return slowest + 2 * stage.layers * self.costs.all_reduce(stage.machines, rows)
        return slowest + self._waiting(stage.machines, stage.start, stage.stop, _Objective("time", "sum", rows))

    def _pass(self, stages: tuple[Stage, ...], rows: int) -> float:
        """Return the seconds of a decode step from the first stage through the last and back."""
        return sum(self._stage_time(s, rows) for s in stages) + self._hops(stages, rows)

    def _hops(self, stages: tuple[Stage, ...], rows: int) -> float:
        if len(stages) == 1:
            return 0.0
        seconds = sum(self.costs.hop(a.machines, b.machines, rows) for a, b in zip(stages, stages[1:], strict=False))
        back = self.costs.network.between(stages[-1].machines[0], stages[0].machines[0])
        return seconds + (back.hop_latency or back.latency if back else INFEASIBLE)

    def _batch(self, stages: tuple[Stage, ...], streams: int) -> tuple[float, int]:
        """Return the seconds of a step, and the number of micro-batches: one, or one per stage, whichever is faster.

        With several micro-batches a step takes a whole pass, or the busiest stage's work for all of them if that is
        longer.
        """
        options = []
        for micro_batches in sorted({1, min(len(stages), streams)}):
            rows = -(-streams // micro_batches)
            busiest = max(self._stage_time(s, rows) for s in stages)
            options.append((max(self._pass(stages, rows), micro_batches * busiest), micro_batches))
        return min(options)

    def _prompt(self, stages: tuple[Stage, ...]) -> float:
        """Return the seconds to prefill a prompt of the requested context, with chunks pipelined through the stages."""
        chunk = min(self.costs.chunk(m) for s in stages for m in s.machines)
        times = [self._stage_time(s, chunk, prefill=True) for s in stages]
        return sum(times) + self._hops(stages, chunk) + (self.costs.context / chunk - 1) * max(times)

    def _replica_capacity(self, stages: tuple[Stage, ...], streams: int) -> int:
        return int(min(self._capacity(p, s.start, s.stop, streams) for s in stages for p in self._parts(s)))


def score(prediction: Prediction, goal: Goal) -> float:
    """Return the quantity that the goal minimises."""
    if goal == "latency":
        return prediction.step_single
    return -prediction.tokens if goal == "throughput" else -float(prediction.capacity)


def _objectives(goal: Goal, stages: int, streams: int) -> tuple[_Objective, ...]:
    if goal == "latency":
        return (_Objective("time", "sum"),)
    if goal == "capacity":
        return (_Objective("capacity", "max"),)
    in_turn = _Objective("time", "sum", streams)
    micro_batches = min(stages, streams)
    return (in_turn, _Objective("time", "max", -(-streams // micro_batches))) if micro_batches > 1 else (in_turn,)


def _in_proportion(costs: Sequence[float], objective: _Objective) -> tuple[float, ...]:
    """Return shares in proportion to speed; equal shares if the objective is not time."""
    if objective.kind != "time":
        return (1 / len(costs),) * len(costs)
    speeds = [1 / c for c in costs]
    return tuple(round(x / sum(speeds), 4) for x in speeds)
