"""Explanations of a plan as text: reasons for a layout, remedies if nothing fits, and commands to serve it. Pure."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tandem.planner.cost import Costs
from tandem.planner.hardware import GIB, Link, Machine
from tandem.planner.solve import Solver
from tandem.planner.types import Candidate, Goal, Layout, LayoutPlan, MachineMemory, Prediction, Request
from tandem.system.metal import gpu_memory

TOLERANCE: dict[Goal, float] = {"latency": 0.05, "throughput": 0.02, "capacity": 0.02}
"""Advantages below this fraction are within the estimates' error; the layout with fewer machines is then chosen."""
GOALS: dict[Goal, str] = {"latency": "fastest answer", "throughput": "most tokens a second", "capacity": "most room"}
"""Property that the chosen layout has most of, by goal."""
_MUCH = 0.25
"""Fraction of a step from which the network is named as the reason."""
_BITS = (8, 4)
_GROUP = 64
_SIZES = (8, 16, 24, 32, 36, 48, 64, 96, 128, 192, 256, 512)
"""Common memory sizes of machines in GiB."""
_MOST_MACHINES = 8
_FEW = 4
"""Number of layouts tried for remedies: those with the least shortage."""
_MOST_MEMORY = 0.95
_STEP = 256
"""Granularity of suggested contexts in tokens."""
_WORDS = {"DP": ("whole copies", "-dp"), "TP": ("each layer divided", "-tp"), "PP": ("layers shared out", "-pp")}
"""Meaning of the parts of a layout's label, and the flags of `tandem serve` that ask for them."""
_WORDS["stages"] = "layers shared out among groups", "--parallel"
LEGEND = "-tp, +: machines compute each layer together. -pp, |: they take turns. -dp, ;: each copy answers requests of its own."
_ANY_LINK = Link(name="any", latency=0.0, bandwidth=1e9)
"""Assumed link of added machines; memory does not depend on it."""


def gib(count: float) -> str:
    """Format bytes in GiB, or in MiB below half a GiB."""
    return f"{count / 2**30:.1f} GiB" if abs(count) >= 2**30 / 2 else f"{count / 2**20:.0f} MiB"


def seconds(value: float) -> str:
    """Format a time in us, ms or s."""
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"


def in_words(text: str) -> str:
    """Return `text` with layouts' labels in plain words: `PP 2 (a | b)` as `layers shared out (-pp 2: a | b)`."""

    def words(found: re.Match[str]) -> str:
        parts = [part.split() for part in found[1].split(" x ")]
        flags = " ".join(f"{_WORDS[kind][1]} {size}" for kind, size in parts)
        return f"{', '.join(_WORDS[kind][0] for kind, _ in parts)} ({flags}{': ' if found[2] else ')'}"

    label = r"((?:(?:DP|TP|PP|stages) [\d,]+(?: x )?)+)( \()?"
    return re.sub(label, words, text).replace("single (", "one machine (").replace("kv heads", "attention heads")


def rate(value: float) -> str:
    """Format tokens per second."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def shortage(candidate: Candidate, machines: Sequence[Machine]) -> str:
    """Return `does not fit: b short of 3.2 GiB (needs 57.6 GiB of 54.4 GiB)`, for up to two machines."""
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
    """Return sentences that justify the chosen layout."""
    found = chosen.prediction
    assert found is not None
    measure = {
        "latency": f"one answer gets {rate(found.tokens_single)} tokens/s ({seconds(found.step_single)} a token)",
        "throughput": f"{streams} answers get {rate(found.tokens)} tokens/s together",
        "capacity": f"{found.capacity:,} tokens fit",
    }[goal]
    rank = "as asked for" if chosen.manual else _rank(chosen, fitting, goal)
    lines = [f"{chosen.label}, {rank}: {measure}."]
    if found.collectives:
        lines.append(
            f"Of each token's {seconds(found.step_single)}, {seconds(found.communication)} are communication: "
            f"the machines wait for one another {found.collectives} times, {seconds(found.collective)} each."
        )
    lines.append(_fullest(found.memory, machines))
    return tuple(lines)


def _rank(chosen: Candidate, fitting: Sequence[Candidate], goal: Goal) -> str:
    if len(fitting) == 1:
        return "the only layout that fits"
    best = max(fitting, key=lambda c: advantage(c, chosen, goal))
    ahead = advantage(best, chosen, goal) - 1
    if best is chosen or ahead < 0.0005:
        return f"{GOALS[goal]} of {len(fitting)} layouts that fit"
    return f"within {ahead:.1%} of the {GOALS[goal]} of {len(fitting)} layouts that fit ({best.label}), and simpler"


def _fullest(memory: Sequence[MachineMemory], machines: Sequence[Machine]) -> str:
    full = max(memory, key=lambda m: m.needed / m.budget)
    states = f" Each checkpoint of a cached prefix takes {gib(full.checkpoint)}." if full.checkpoint else ""
    return (
        f"Fullest machine: {machines[full.machine].name} with {gib(full.needed)} of {gib(full.budget)} "
        f"(model {gib(full.weights)}, conversations {gib(full.kv)}, spare {gib(full.headroom)}).{states}"
    )


def why_lost(candidate: Candidate, chosen: Candidate, goal: Goal) -> str:
    """Return the reason why a layout that fits was not chosen."""
    layout, loser, winner = candidate.layout, candidate.prediction, chosen.prediction
    assert layout is not None and loser is not None and winner is not None
    behind = advantage(chosen, candidate, goal)
    if behind < 1 + TOLERANCE[goal]:
        more = len(layout.machines) - (len(chosen.layout.machines) if chosen.layout else 0)
        using = f" with {more} more machine{'s' if more > 1 else ''}" if more > 0 else ""
        return f"about the same: {_compare(behind)}{using}"
    if goal == "capacity":
        return f"holds fewer tokens: {loser.capacity:,} against {winner.capacity:,}"
    if goal == "throughput":
        return f"fewer tokens: {rate(loser.tokens)} against {rate(winner.tokens)} tokens/s{_cause(layout, loser)}"
    times = f"{seconds(loser.step_single)} against {seconds(winner.step_single)} a token"
    return f"slower: {times}{_cause(layout, loser)}"


def _cause(layout: Layout, loser: Prediction) -> str:
    """Return the bottleneck of a layout, from its shape and its time on the network; empty if none stands out."""
    stages = layout.replicas[0]
    if loser.collectives and loser.communication > _MUCH * loser.step_single:
        return (
            f"; the machines wait for one another {loser.collectives} times, {seconds(loser.collective)} each, "
            f"{loser.communication / loser.step_single:.0%} of it"
        )
    if len(layout.replicas) > 1 and len(stages) == 1 and len(stages[0].machines) == 1:
        return "; each answer comes from one machine alone"
    if len(stages) > 1:
        return "; the machines work on a token in turn"
    if len(layout.machines) == 1:
        return "; one machine reads all weights for every token"
    heads = stages[0].kv_heads
    if len(set(heads)) > 1 and len(set(stages[0].shares)) > 1:
        return f"; unequal shares, attention heads {'+'.join(map(str, heads))}: all wait for the slowest"
    return ""


def _compare(behind: float) -> str:
    gap = abs(behind - 1)
    return "equal" if gap < 0.0005 else f"{gap:.1%} {'worse' if behind > 1 else 'better'}"


def advantage(a: Candidate, b: Candidate, goal: Goal) -> float:
    """Return how many times better `a` is than `b` for the goal."""
    assert a.prediction is not None and b.prediction is not None
    if goal == "latency":
        return b.prediction.step_single / a.prediction.step_single
    if goal == "throughput":
        return a.prediction.tokens / b.prediction.tokens
    return (a.prediction.capacity + 1) / (b.prediction.capacity + 1)


# ---- remedies


def refusal(answer: LayoutPlan) -> str:
    """Return the error text for a model that fits nowhere: the closest layout, and remedies."""
    closest = answer.candidates[0]
    ways = "; ".join(answer.remedies) or "no single change that the planner knows is enough"
    asked = f"{answer.context:,} tokens of context for {answer.streams} answer{'s' if answer.streams > 1 else ''} at once"
    return in_words(f"nothing fits {asked}; closest is {closest.label}, which {closest.reason}. Would fit: {ways}")


def remedies(costs: Costs, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Return single changes that would each make a layout fit; empty if none is found."""
    close = sorted((c for c in candidates if c.layout), key=lambda c: c.short)[:_FEW]
    layouts = [c.layout for c in close if c.layout]
    fixed = all(c.manual for c in close)

    def fits(changed: Costs, layouts: Sequence[Layout] = layouts) -> bool:
        return _fits(Solver(changed), layouts, fixed)

    options = [_smaller_request(costs, fits), _smaller_weights(costs, fits), _more_memory_share(costs, fits)]
    if not fixed:
        options.append(_more_machines(costs, layouts, fits))
    return tuple(text for texts in options for text in texts)


def _fits(solver: Solver, layouts: Sequence[Layout], fixed: bool) -> bool:
    """Return whether any layout fits, with its layers and heads unchanged (`fixed`) or placed again."""
    streams = solver.costs.request.streams
    for layout in layouts:
        if fixed:
            if not any(m.short for m in solver.predict(layout, streams).memory):
                return True
            continue
        groups = [tuple(stage.machines for stage in stages) for stages in layout.replicas]
        if all(solver.least_short(g, -(-streams // len(groups))) <= 0 for g in groups):
            return True
    return False


def _smaller_request(costs: Costs, fits: Callable[[Costs], bool]) -> list[str]:
    """Return the largest context, and the most streams, that would fit."""
    asked = costs.request
    steps = _largest(
        lambda n: fits(costs.changed(request=replace(asked, context=n * _STEP))), ((asked.context or 1) - 1) // _STEP
    )
    streams = _largest(lambda n: fits(costs.changed(request=replace(asked, streams=n))), asked.streams - 1)
    return [
        *([f"a context of {steps * _STEP:,} tokens (--context {steps * _STEP})"] if steps else []),
        *([f"{streams} answer{'s' if streams > 1 else ''} at once (--streams {streams})"] if streams else []),
    ]


def _smaller_weights(costs: Costs, fits: Callable[[Costs], bool]) -> list[str]:
    model, experts = costs.model, costs.experts
    has = f"{model.quantization['bits']}-bit" if model.quantization else model.dtype
    for bits in _BITS:
        ratio = (bits + 32 / _GROUP) / 8 / costs.stored_param_bytes
        if ratio >= 0.95:
            continue
        smaller = replace(
            model,
            quantization={"group_size": _GROUP, "bits": bits, "mode": "affine"},
            layer_bytes=tuple(int(n * ratio) for n in model.layer_bytes),
            embed_bytes=int(model.embed_bytes * ratio),
            head_bytes=int(model.head_bytes * ratio),
        )
        scaled = experts and replace(experts, layer_bytes=tuple(int(n * ratio) for n in experts.layer_bytes))
        if fits(costs.changed(description=smaller, experts=scaled)):
            return [f"{'an' if bits == 8 else 'a'} {bits}-bit model instead of {has}"]
    return []


def _more_memory_share(costs: Costs, fits: Callable[[Costs], bool]) -> list[str]:
    first = round(costs.request.memory_fraction * 100) + 1
    for percent in range(first, round(_MOST_MEMORY * 100) + 1):
        if fits(costs.changed(request=replace(costs.request, memory_fraction=percent / 100))):
            return [f"--memory-fraction {percent / 100:.2f}, which leaves the system less"]
    return []


def _more_machines(costs: Costs, layouts: Sequence[Layout], fits: Callable[[Costs, Sequence[Layout]], bool]
                   ) -> list[str]:  # fmt: skip
    """Suggest more pipeline stages: one machine with the least sufficient memory, else several of the largest size."""
    like, first = max(costs.machines, key=lambda m: m.memory), len(costs.machines)
    links = costs.links if any(x.between is None for x in costs.links) else (*costs.links, _ANY_LINK)
    for count, size in [(1, s) for s in _SIZES] + [(n, _SIZES[-1]) for n in range(2, _MOST_MACHINES + 1)]:
        memory = gpu_memory(size * GIB) if like.gpu and like.chip not in ("h200", "gb10") else size * GIB
        extra = tuple(replace(like, name=f"new-{i}", memory=memory) for i in range(count))
        longer = [_longer(x, first, count) for x in layouts if len(x.replicas) == 1]
        if fits(costs.changed(machines=(*costs.machines, *extra), links=links), longer):
            what = f"one more machine with {size} GB" if count == 1 else f"{count} more machines with {size} GB each"
            return [f"{what} ({gib(memory)} for MLX)" if memory < size * GIB else what]
    return []


def _longer(layout: Layout, first: int, count: int) -> Layout:
    """Return the layout with `count` single machines, from number `first`, as further stages; only its arrangement is
    used."""
    last = layout.replicas[0][-1]
    extra = tuple(replace(last, machines=(first + i,), kv_heads=last.kv_heads[:1], shares=(1.0,)) for i in range(count))
    return Layout(replicas=((*layout.replicas[0], *extra),))


def _largest(enough: Callable[[int], bool], most: int) -> int:
    """Return the largest number in 1..`most` for which `enough` holds, by binary search; 0 if none. `enough` is
    monotonic."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if enough(middle) else (low, middle - 1)
    return low


# ---- commands


@dataclass(frozen=True, kw_only=True)
class Named:
    """Model and machines as named by the user in the flags of `tandem plan`."""

    model: str
    revision: str | None = None
    hosts: list[str] | None = None
    new_hostfile: str = "hosts.json"
    """Hosts file to write for `hosts`."""
    reached: Mapping[str, str] = field(default_factory=dict)
    """Entries of a hosts file, by host name, for hosts that are not reached over ssh by their name."""
    hostfile: str | None = None
    profile: str | None = None
    fast_sync: str = "off"
    max_memory: str | None = None


def serve_flags(plan: LayoutPlan, request: Request, named: Named) -> list[str]:
    """Return the flags of `tandem serve` for the chosen layout."""
    assert plan.chosen is not None
    layout, prediction = plan.chosen.layout, plan.chosen.prediction
    assert layout is not None and prediction is not None
    stages = layout.replicas[0]
    sizes = [len(s.machines) for s in stages]
    flags: list[str] = []
    if len(layout.replicas) > 1:
        flags += ["--data-parallel-size", str(len(layout.replicas))]
    if len(set(sizes)) > 1:
        flags += ["--parallel", ",".join(map(str, sizes))]
    else:
        flags += ["--tensor-parallel-size", str(sizes[0])] if sizes[0] > 1 else []
        flags += ["--pipeline-parallel-size", str(len(sizes))] if len(sizes) > 1 else []
    flags += ["--max-memory", named.max_memory] if named.max_memory else []
    if named.fast_sync != "off":
        flags += ["--fast-sync", named.fast_sync]
    if shares := _shares(layout):
        flags += ["--tensor-split", ",".join(f"{x:g}" for x in shares)]
    flags += ["--expert-parallel"] if any(s.whole_experts for replica in layout.replicas for s in replica) else []
    if len(stages) > 1:
        flags += ["--layer-split", ",".join(str(s.layers) for s in stages)]
        flags += (
            ["--micro-batches", str(prediction.micro_batches)]
            if plan.streams > 1 and prediction.micro_batches != len(stages)
            else []
        )
    flags += ["--max-context", str(plan.context)]  # by default the engine reserves memory for the model's full context
    flags += ["--max-batch-size", str(max(1, -(-plan.streams // len(layout.replicas))))] if plan.streams > 1 else []
    default = Request()
    flags += ["--enable-lora"] if request.max_loras else []
    for name in ("dtype", "dequantize", "kv_dtype", "prefill_chunk", "memory_fraction", "max_loras", "max_lora_rank"):
        value = getattr(request, name)
        flags += [f"--{name.replace('_', '-')}", str(value)] if value != getattr(default, name) else []
    return flags


def commands(layout: Layout, flags: Sequence[str], machines: Sequence[Machine], named: Named) -> list[str]:
    """Return the shell commands that serve the model on the chosen machines, in the layout's order."""
    chosen, where = list(layout.machines), []
    serve = ["tandem serve", shlex.quote(named.model)]
    serve += ["--revision", shlex.quote(named.revision)] if named.revision else []
    serve += ["--hardware-profile", shlex.quote(named.profile)] if named.profile and len(chosen) > 1 else []
    if named.hosts:
        hosts = [shlex.quote(named.reached.get(machines[i].name, machines[i].name)) for i in chosen]
        return [
            " ".join(["tandem hosts write", named.new_hostfile, *hosts]),
            " ".join([*serve, "--hostfile", named.new_hostfile, *flags]),
        ]
    if named.hostfile:
        where = ["--hostfile", shlex.quote(named.hostfile)]
        if chosen != list(range(len(machines))):
            where += ["--host-entries", ",".join(map(str, chosen))]
    return [" ".join([*serve, *where, *flags])]


def caveats(layout: Layout, machines: Sequence[Machine]) -> list[str]:
    """Return sentences about properties of the layout that the flags do not express."""
    lines = []
    if len(layout.machines) > 1:
        lines.append(f"Machines in order: {', '.join(machines[i].name for i in layout.machines)}.")
    uneven = [s for stages in layout.replicas for s in stages if _is_uneven(s.shares)]
    if uneven and not _shares(layout):
        lines.append("The groups' machines have different shares, which one --tensor-split cannot say.")
    splits = {tuple(s.layers for s in stages) for stages in layout.replicas}
    if len(splits) > 1:
        lines.append("The copies have different layer splits: start each with its own --layer-split.")
    return lines


def _shares(layout: Layout) -> tuple[float, ...] | None:
    """Return the shares of all stages if they are equal across stages but uneven within; else None."""
    first, *others = {s.shares for stages in layout.replicas for s in stages}
    return first if not others and _is_uneven(first) else None


def _is_uneven(shares: Sequence[float]) -> bool:
    return max(shares) - min(shares) > 1e-6


def plan_json(plan: LayoutPlan, machines: Sequence[Machine]) -> dict[str, object]:
    """Return the plan as JSON-compatible data, in seconds, bytes and tokens per second."""
    return {
        "goal": plan.goal,
        "context": plan.context,
        "streams": plan.streams,
        "chosen": None if plan.chosen is None else plan.chosen.label,
        "reasons": list(plan.reasons),
        "remedies": list(plan.remedies),
        "candidates": [_candidate_json(c, machines) for c in plan.candidates],
        "estimate": True,
    }


def _candidate_json(candidate: Candidate, machines: Sequence[Machine]) -> dict[str, object]:
    prediction = None
    if candidate.prediction is not None:
        prediction = dataclasses.asdict(candidate.prediction)
        prediction["lanes"] = prediction.pop("micro_batches")
        for entry, memory in zip(prediction["memory"], candidate.prediction.memory, strict=True):
            entry |= {"machine": machines[memory.machine].name, "needed": memory.needed, "short": memory.short}
    replicas = candidate.layout.replicas if candidate.layout else ()
    return {
        "label": candidate.label,
        "fits": candidate.fits,
        "reason": candidate.reason,
        "replicas": [
            [
                {
                    "machines": [machines[i].name for i in s.machines],
                    "layers": [s.start, s.stop],
                    "kv_heads": list(s.kv_heads),
                    "shares": list(s.shares),
                    "expert_parallel": s.whole_experts,
                }
                for s in stages
            ]
            for stages in replicas
        ],
        "prediction": prediction,
    }
