"""The partition planner: which machines hold which part of a model, before anything is loaded. Pure.

`plan` enumerates arrangements of the machines (`layouts`), places layers and kv heads in each at least cost
(`solve`), predicts memory and time (`cost`), ranks what fits for a goal, and says why
(`words`) or what would fit. Predictions are estimates, good for comparing layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.errors import ConfigError, LayoutError
from tandem.models.description import ModelDescription
from tandem.planner.cost import Costs
from tandem.planner.hardware import GIB, Link, Machine
from tandem.planner.layouts import (
    Arrangement,
    arrangements,
    kind_of,
    label,
    why_not_tensor_parallel,
)
from tandem.planner.manual import arrangement_of
from tandem.planner.solve import Solver, score
from tandem.planner.types import (
    GOALS,
    Candidate,
    Experts,
    Goal,
    Layout,
    LayoutPlan,
    ManualLayout,
    NothingFits,
    Request,
)
from tandem.planner.words import TOLERANCE, advantage, gib, shortage, why_lost, why_won
from tandem.system.metal import gpu_memory

_BITS = (8, 4)
_GROUP = 64
_SIZES = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
"""GiB of memory that machines are sold with."""
_MOST_MACHINES = 8
_FEW = 4
"""Layouts tried, those that are least short."""
_MOST_MEMORY = 0.95
_STEP = 256
"""Tokens of context are suggested in multiples of this."""


@dataclass(frozen=True)
class Situation:
    """A question to the planner, complete."""

    description: ModelDescription
    machines: tuple[Machine, ...]
    links: tuple[Link, ...]
    request: Request
    experts: Experts | None


def remedies(situation: Situation, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Single changes that would be enough, or what is missing if none is."""
    close = sorted((c for c in candidates if c.layout), key=lambda c: c.short)[:_FEW]
    layouts = [c.layout for c in close if c.layout]
    fixed = all(c.manual for c in close)
    found = [
        _less_context(situation, layouts, fixed),
        _fewer_streams(situation, layouts, fixed),
        _fewer_bits(situation, layouts, fixed),
        _more_memory_share(situation, layouts, fixed),
        None if fixed else _more_machines(situation, layouts),
    ]
    return tuple(text for text in found if text)


def _fits(situation: Situation, layouts: Sequence[Layout], fixed: bool) -> bool:
    """Whether any of the arrangements fits, with layers and heads as they are or freely placed again."""
    s = situation
    solver = Solver(Costs(s.description, s.machines, s.links, s.request, s.experts))
    for layout in layouts:
        if fixed:
            if not any(m.short for m in solver.predict(layout, s.request.streams).memory):
                return True
            continue
        each = -(-s.request.streams // len(layout.replicas))
        groups = [tuple(stage.machines for stage in stages) for stages in layout.replicas]
        if all(solver.least_short(g, each) <= 0 for g in groups):
            return True
    return False


def _less_context(situation: Situation, layouts: Sequence[Layout], fixed: bool) -> str | None:
    def enough(steps: int) -> bool:
        request = replace(situation.request, context=steps * _STEP)
        return _fits(replace(situation, request=request), layouts, fixed)

    steps = _largest(enough, ((situation.request.context or 1) - 1) // _STEP)
    return f"a context of {steps * _STEP:,} tokens (--context {steps * _STEP})" if steps else None


def _fewer_streams(situation: Situation, layouts: Sequence[Layout], fixed: bool) -> str | None:
    def enough(streams: int) -> bool:
        return _fits(replace(situation, request=replace(situation.request, streams=streams)), layouts, fixed)

    streams = _largest(enough, situation.request.streams - 1)
    return f"{streams} stream{'s' if streams > 1 else ''} at once (--streams {streams})" if streams else None


def _fewer_bits(situation: Situation, layouts: Sequence[Layout], fixed: bool) -> str | None:
    model = situation.description
    stored = Costs(model, situation.machines, situation.links, situation.request).stored_param_bytes
    has = f"{model.quantization['bits']}-bit" if model.quantization else model.dtype
    for bits in _BITS:
        ratio = (bits + 32 / _GROUP) / 8 / stored
        if ratio < 0.95 and _fits(_scaled(situation, bits, ratio), layouts, fixed):
            return f"{'an' if bits == 8 else 'a'} {bits}-bit model instead of {has}"
    return None


def _scaled(situation: Situation, bits: int, ratio: float) -> Situation:
    model, experts = situation.description, situation.experts
    smaller = replace(
        model,
        quantization={"group_size": _GROUP, "bits": bits, "mode": "affine"},
        layer_bytes=tuple(int(n * ratio) for n in model.layer_bytes),
        embed_bytes=int(model.embed_bytes * ratio),
        head_bytes=int(model.head_bytes * ratio),
    )
    if experts:
        experts = replace(experts, layer_bytes=tuple(int(n * ratio) for n in experts.layer_bytes))
    return replace(situation, description=smaller, experts=experts)


def _more_memory_share(situation: Situation, layouts: Sequence[Layout], fixed: bool) -> str | None:
    first = round(situation.request.memory_fraction * 100) + 1
    for percent in range(first, round(_MOST_MEMORY * 100) + 1):
        request = replace(situation.request, memory_fraction=percent / 100)
        if _fits(replace(situation, request=request), layouts, fixed):
            return f"--memory-fraction {percent / 100:.2f}, which leaves the system less"
    return None


def _more_machines(situation: Situation, layouts: Sequence[Layout]) -> str | None:
    """More pipeline stages: one of the least memory that is enough, else several of the largest."""
    like = max(situation.machines, key=lambda m: m.memory)
    for count, size in [(1, s) for s in _SIZES] + [(n, _SIZES[-1]) for n in range(2, _MOST_MACHINES + 1)]:
        memory = gpu_memory(size * GIB) if like.gpu and like.chip != "h200" else size * GIB
        first = len(situation.machines)
        extra = tuple(replace(like, name=f"new-{i}", memory=memory) for i in range(count))
        links = (*situation.links, *(() if any(x.between is None for x in situation.links) else (_anything(),)))
        larger = replace(situation, machines=situation.machines + extra, links=links)
        if _fits(larger, [_longer(x, first, count) for x in layouts if len(x.replicas) == 1], fixed=False):
            what = f"one more machine with {size} GB" if count == 1 else f"{count} more machines with {size} GB each"
            return f"{what} ({gib(memory)} for MLX)" if memory < size * GIB else what
    return None


def _longer(layout: Layout, first: int, count: int) -> Layout:
    """The layout with single machines as further stages; only its arrangement counts."""
    last = layout.replicas[0][-1]
    extra = tuple(replace(last, machines=(first + i,), kv_heads=last.kv_heads[:1], shares=(1.0,)) for i in range(count))
    return Layout(replicas=((*layout.replicas[0], *extra),))


def _anything() -> Link:
    """Memory does not depend on the link."""
    return Link(name="any", latency=0.0, bandwidth=1e9)


def _largest(enough: Callable[[int], bool], most: int) -> int:
    """The largest number from 1 to `most` for which `enough` holds (it does for all below), else 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if enough(middle) else (low, middle - 1)
    return low


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

    Of layouts that are within a few percent of the best, the one with the fewest machines is taken. Raises
    `NothingFits` (an OutOfMemory with the plan and what would work) when no layout has enough memory, `LayoutError`
    when a manual layout suits neither model nor machines, `ConfigError` for a request that makes no sense.
    """
    request = _complete(request, description)
    _check(machines, request)
    solver = Solver(Costs(description, machines, links, request, experts))
    goal: Goal = request.goal or ("latency" if request.streams == 1 else "throughput")
    if request.layouts:
        candidates = [_manual(m, solver, machines, request, goal) for m in request.layouts]
    else:
        candidates = _search(solver, machines, request, goal)
    answer = _judge(candidates, machines, request, goal)
    if answer.chosen is not None:
        return answer
    situation = Situation(description, tuple(machines), tuple(links), request, experts)
    ways = remedies(situation, candidates)
    if request.layouts:
        ways = (*_without_layout(situation), *ways)
    answer = replace(answer, remedies=ways)
    raise NothingFits(_refusal(answer, machines), answer)


def _complete(request: Request, model: ModelDescription) -> Request:
    if request.context is None:
        return replace(request, context=min(DEFAULT_CONTEXT, model.max_context))
    if not 1 <= request.context <= model.max_context:
        raise ConfigError(
            f"--context {request.context}: the model takes 1 to {model.max_context} tokens", param="context"
        )
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
    if request.streams < 1:
        raise ConfigError(f"--streams {request.streams}: must be at least 1", param="streams")
    if request.prefill_chunk is not None and request.prefill_chunk < 1:
        raise ConfigError(f"--prefill-chunk {request.prefill_chunk}: must be at least 1", param="prefill_chunk")
    if not 0 < request.memory_fraction <= 1:
        raise ConfigError(
            f"--memory-fraction {request.memory_fraction}: must be above 0 and at most 1", param="memory_fraction"
        )
    if request.goal is not None and request.goal not in GOALS:
        raise ConfigError(f"--goal {request.goal}: is not one of {', '.join(GOALS)}", param="goal")


def _manual(
    manual: ManualLayout, solver: Solver, machines: Sequence[Machine], request: Request, goal: Goal
) -> Candidate:
    arrangement = arrangement_of(manual, solver.costs.model, solver.divider, machines)
    each = -(-request.streams // len(arrangement))
    layout = Layout(
        replicas=tuple(solver.fixed(groups, each, manual.layers, manual.split, goal) for groups in arrangement)
    )
    prediction = solver.predict(layout, request.streams)
    if prediction.step_single == float("inf"):
        raise LayoutError(f"--layout {label(layout, machines)}: no link joins all its machines", param="layout")
    return Candidate(label=label(layout, machines), layout=layout, prediction=prediction, manual=True)


def _search(solver: Solver, machines: Sequence[Machine], request: Request, goal: Goal) -> list[Candidate]:
    """The best candidate of each kind, and a note for each size of tensor parallelism that the model rules out."""
    model, network = solver.costs.model, solver.costs.network
    best: dict[object, Candidate] = {}
    for arrangement in arrangements(model.num_layers - len(model.uncut), solver.divider, machines, network):
        candidate = _candidate(arrangement, solver, machines, request.streams, goal)
        kind = kind_of(arrangement, machines, network)
        if kind not in best or _order(candidate, goal) < _order(best[kind], goal):
            best[kind] = candidate
    ruled_out: dict[str, Candidate] = {}
    for size in range(2, len(machines) + 1):
        if why := why_not_tensor_parallel(solver.divider, size):
            ruled_out.setdefault(
                why, Candidate(label=f"TP {size}", layout=None, prediction=None, reason=f"impossible: {why}")
            )
    return [*best.values(), *ruled_out.values()]


def _candidate(
    arrangement: Arrangement, solver: Solver, machines: Sequence[Machine], streams: int, goal: Goal
) -> Candidate:
    each = -(-streams // len(arrangement))
    layout = Layout(replicas=tuple(solver.replica(groups, each, goal) for groups in arrangement))
    prediction = solver.predict(layout, streams)
    return Candidate(label=label(layout, machines), layout=layout, prediction=prediction)


def _order(candidate: Candidate, goal: Goal) -> tuple[float, ...]:
    """Best first: those that fit by the goal, then the others by what they lack, then what is impossible."""
    if candidate.prediction is None or candidate.layout is None:
        return (2,)
    if not candidate.fits:
        return (1, candidate.short, len(candidate.layout.machines))
    size = len(candidate.layout.machines)
    return (0, score(candidate.prediction, goal), size, len(candidate.layout.replicas[0]))


def _judge(candidates: list[Candidate], machines: Sequence[Machine], request: Request, goal: Goal) -> LayoutPlan:
    ranked = sorted(candidates, key=lambda c: (_order(c, goal), c.label))
    fitting = [c for c in ranked if c.fits]
    chosen = _simplest(fitting, goal) if fitting else None
    reasons: tuple[str, ...] = ()
    told: list[Candidate] = []
    if chosen is not None:
        reasons = why_won(chosen, fitting, machines, goal, request.streams)
        told.append(replace(chosen, reason="asked for" if chosen.manual else "chosen"))
    for c in ranked:
        if c is chosen:
            continue
        if c.prediction is None:
            told.append(c)
        elif not c.fits or chosen is None:
            told.append(replace(c, reason=shortage(c, machines)))
        else:
            told.append(replace(c, reason=why_lost(c, chosen, goal)))
    return LayoutPlan(
        goal=goal,
        context=request.context or 0,
        streams=request.streams,
        candidates=tuple(told),
        chosen=told[0] if chosen is not None else None,
        reasons=reasons,
    )


def _simplest(fitting: Sequence[Candidate], goal: Goal) -> Candidate:
    """The best, or one as good within the estimates' accuracy with fewer machines, or smaller replicas."""
    near = [c for c in fitting if advantage(fitting[0], c, goal) <= 1 + TOLERANCE[goal]]
    return min(near, key=lambda c: (*_size(c), _order(c, goal)))


def _size(candidate: Candidate) -> tuple[int, int]:
    """Machines in all, and in one replica."""
    if candidate.layout is None:
        return 0, 0
    count = len(candidate.layout.machines)
    return count, count // len(candidate.layout.replicas)


def _without_layout(situation: Situation) -> tuple[str, ...]:
    try:
        found = plan(
            situation.description,
            situation.machines,
            situation.links,
            replace(situation.request, layouts=()),
            experts=situation.experts,
        )
    except NothingFits:
        return ()
    return (f"another layout: {found.chosen.label}",) if found.chosen else ()


def _refusal(answer: LayoutPlan, machines: Sequence[Machine]) -> str:
    closest = answer.candidates[0]
    ways = "; ".join(answer.remedies) or "no single change that the planner knows is enough"
    asked = f"{answer.context:,} tokens of context for {answer.streams} stream{'s' if answer.streams > 1 else ''}"
    return f"nothing fits {asked}; closest is {closest.label}, which {closest.reason}. Would fit: {ways}"
