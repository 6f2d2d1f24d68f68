"""What would make a model fit that does not. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tandem.models.description import ModelDescription
from tandem.planner.cost import Costs
from tandem.planner.hardware import GIB, Link, Machine
from tandem.planner.solve import Solver
from tandem.planner.types import Candidate, Experts, Layout, Request
from tandem.planner.words import gib
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
