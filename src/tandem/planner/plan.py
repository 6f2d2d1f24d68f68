"""Partition planner: decides, before loading, which machines hold which part of a model. Pure.

`plan` enumerates arrangements of machines (`layouts`) and places layers and kv heads at least cost (`solve`). It then
predicts memory and time (`cost`), ranks layouts for a goal, and explains the result (`explain`). Predictions are
estimates, meant for comparing layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tandem.errors import ConfigError, LayoutError
from tandem.models.description import ModelDescription
from tandem.planner.cost import Costs
from tandem.planner.explain import TOLERANCE, advantage, refusal, remedies, shortage, why_lost, why_won
from tandem.planner.hardware import Link, Machine
from tandem.planner.layouts import Arrangement, arrangement_of, arrangements, kind_of, label
from tandem.planner.solve import Solver, score
from tandem.planner.types import GOALS, Candidate, Experts, Goal, Layout, LayoutPlan, ManualLayout, NothingFits, Request

DEFAULT_CONTEXT = 8192


def plan(
    description: ModelDescription,
    machines: Sequence[Machine],
    links: Sequence[Link],
    request: Request,
    *,
    experts: Experts | None = None,
) -> LayoutPlan:
    """Choose a layout for `machines`, or check those of `request.layouts`. Deterministic.

    Among layouts within a few percent of the best, the one with the fewest machines is chosen. Raise `NothingFits` (an
    OutOfMemory with the plan and remedies) if no layout has enough memory. Raise `LayoutError` for a manual layout that
    does not suit model or machines, `ConfigError` for an invalid request.
    """
    request = _complete(request, description)
    _check(machines, request)
    solver = Solver(Costs(description, machines, links, request, experts))
    goal: Goal = request.goal or ("latency" if request.streams == 1 else "throughput")
    candidates = [_manual(m, solver, goal) for m in request.layouts] or _search(solver, goal)
    answer = _judge(candidates, solver.costs, goal)
    if answer.chosen is not None:
        return answer
    ways = remedies(solver.costs, candidates)
    if request.layouts:
        ways = (*_without_layout(solver.costs), *ways)
    answer = replace(answer, remedies=ways)
    raise NothingFits(refusal(answer), answer)


def _complete(request: Request, model: ModelDescription) -> Request:
    if request.context is None:
        return replace(request, context=min(DEFAULT_CONTEXT, model.max_context))
    if not 1 <= request.context <= model.max_context:
        raise ConfigError(f"--context {request.context}: the model takes 1 to {model.max_context} tokens", param="context")
    return request


def _check(machines: Sequence[Machine], request: Request) -> None:
    names = [m.name for m in machines]
    if not names:
        raise LayoutError("there are no machines to plan for; give --hosts", param="hosts")
    for m in machines:
        if names.count(m.name) > 1:
            raise LayoutError(f"--hosts: {m.name} is there twice; one rank runs on a machine", param="hosts")
        if min(m.memory, m.bandwidth, m.flops) <= 0:
            raise LayoutError(f"--hosts {m.name}: memory, bandwidth and FLOP/s must be above 0", param="hosts")
    chunk, fraction = request.prefill_chunk, request.memory_fraction
    for name, value, ok, allowed in (
        ("streams", request.streams, request.streams >= 1, "must be at least 1"),
        ("max_loras", request.max_loras, request.max_loras >= 0, "must be at least 0"),
        ("max_lora_rank", request.max_lora_rank, request.max_lora_rank >= 1, "must be at least 1"),
        ("prefill_chunk", chunk, chunk is None or chunk >= 1, "must be at least 1"),
        ("memory_fraction", fraction, 0 < fraction <= 1, "must be above 0 and at most 1"),
        ("goal", request.goal, request.goal in (None, *GOALS), f"is not one of {', '.join(GOALS)}"),
    ):
        if not ok:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: {allowed}", param=name)


def _manual(manual: ManualLayout, solver: Solver, goal: Goal) -> Candidate:
    costs = solver.costs
    arrangement = arrangement_of(manual, costs.model, solver.divider, costs.machines)
    each = -(-costs.request.streams // len(arrangement))
    candidate = _candidate(
        solver, Layout(replicas=tuple(solver.fixed(groups, each, manual.layers, manual.split, goal) for groups in arrangement))
    )
    if candidate.prediction is not None and candidate.prediction.step_single == float("inf"):
        raise LayoutError(f"--layout {candidate.label}: no link joins all its machines", param="layout")
    return replace(candidate, manual=True)


def _search(solver: Solver, goal: Goal) -> list[Candidate]:
    """Return the best candidate of each kind, and a note for each tensor-parallel size that the model rules out."""
    costs = solver.costs
    model, network, machines = costs.model, costs.network, costs.machines
    best: dict[object, Candidate] = {}
    for arrangement in arrangements(model.num_layers - len(model.uncut), solver.divider, machines, network):
        candidate = _candidate(solver, _best_layout(arrangement, solver, goal))
        kind = kind_of(arrangement, network)
        if kind not in best or _order(candidate, goal) < _order(best[kind], goal):
            best[kind] = candidate
    ruled_out: dict[str, Candidate] = {}
    for size in range(2, len(machines) + 1):
        if why := solver.divider.refusal(size):
            note = Candidate(label=f"TP {size}", layout=None, prediction=None, reason=f"impossible: {why}")
            ruled_out.setdefault(why, note)
    return [*best.values(), *ruled_out.values()]


def _best_layout(arrangement: Arrangement, solver: Solver, goal: Goal) -> Layout:
    each = -(-solver.costs.request.streams // len(arrangement))
    return Layout(replicas=tuple(solver.replica(groups, each, goal) for groups in arrangement))


def _candidate(solver: Solver, layout: Layout) -> Candidate:
    prediction = solver.predict(layout, solver.costs.request.streams)
    return Candidate(label=label(layout, solver.costs.machines), layout=layout, prediction=prediction)


def _order(candidate: Candidate, goal: Goal) -> tuple[float, ...]:
    """Return a sort key: layouts that fit, by the goal; then the rest, by missing bytes; then impossible ones."""
    if candidate.prediction is None or candidate.layout is None:
        return (2,)
    if not candidate.fits:
        return (1, candidate.short, len(candidate.layout.machines))
    size = len(candidate.layout.machines)
    return (0, score(candidate.prediction, goal), size, len(candidate.layout.replicas[0]))


def _judge(candidates: list[Candidate], costs: Costs, goal: Goal) -> LayoutPlan:
    ranked = sorted(candidates, key=lambda c: (_order(c, goal), c.label))
    fitting = [c for c in ranked if c.fits]
    chosen = _simplest(fitting, goal) if fitting else None
    explained: list[Candidate] = []
    for c in ranked:
        if c is chosen:
            explained.insert(0, replace(c, reason="asked for" if c.manual else "chosen"))
        elif c.prediction is None:
            explained.append(c)
        elif not c.fits or chosen is None:
            explained.append(replace(c, reason=shortage(c, costs.machines)))
        else:
            explained.append(replace(c, reason=why_lost(c, chosen, goal)))
    streams = costs.request.streams
    return LayoutPlan(
        goal=goal,
        context=costs.context,
        streams=streams,
        candidates=tuple(explained),
        chosen=explained[0] if chosen is not None else None,
        reasons=() if chosen is None else why_won(chosen, fitting, costs.machines, goal, streams),
    )


def _simplest(fitting: Sequence[Candidate], goal: Goal) -> Candidate:
    """Return the best layout, or one within tolerance of it with fewer machines or smaller replicas."""
    near = [c for c in fitting if advantage(fitting[0], c, goal) <= 1 + TOLERANCE[goal]]
    return min(near, key=lambda c: (*_size(c), _order(c, goal)))


def _size(candidate: Candidate) -> tuple[int, int]:
    """Return the number of machines in all, and per replica."""
    if candidate.layout is None:
        return 0, 0
    count = len(candidate.layout.machines)
    return count, count // len(candidate.layout.replicas)


def _without_layout(costs: Costs) -> tuple[str, ...]:
    try:
        answer = plan(costs.model, costs.machines, costs.links, replace(costs.request, layouts=()), experts=costs.experts)
    except NothingFits:
        return ()
    return (f"another layout: {answer.chosen.label}",) if answer.chosen else ()
