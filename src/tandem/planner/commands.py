"""What to type so that a chosen layout is served. Pure."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.planner.hardware import Machine
from tandem.planner.types import Layout, LayoutPlan


class Asked(Protocol):
    """What was planned for, by the names of the flags of `tandem plan`."""

    model: str
    revision: str | None
    hosts: list[str] | None
    hostfile: str | None
    profile: str | None
    fast_sync: str
    dtype: str
    dequantize: str
    kv_dtype: str
    prefill_chunk: int | None
    memory_fraction: float


@dataclass
class Plainly:
    """A model on machines that are named, and the defaults for all else."""

    model: str
    revision: str | None
    hosts: list[str] | None
    hostfile: str | None = None
    profile: str | None = None
    fast_sync: str = "off"
    dtype: str = "auto"
    dequantize: str = "auto"
    kv_dtype: str = "auto"
    prefill_chunk: int | None = None
    memory_fraction: float = 0.85


def serve_flags(plan: LayoutPlan, asked: Asked) -> list[str]:
    """Flags of `tandem serve` for the chosen layout."""
    assert plan.chosen is not None
    layout, prediction = plan.chosen.layout, plan.chosen.prediction
    assert layout is not None
    assert prediction is not None
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
    if asked.fast_sync != "off":
        flags += ["--fast-sync", asked.fast_sync]
    if shares := _shares(layout):
        flags += ["--tensor-split", ",".join(f"{x:g}" for x in shares)]
    flags += ["--expert-parallel"] if any(s.whole_experts for one in layout.replicas for s in one) else []
    if len(stages) > 1:
        flags += ["--layer-split", ",".join(str(s.layers) for s in stages)]
        flags += ["--lanes", str(prediction.lanes)] if plan.streams > 1 and prediction.lanes != len(stages) else []
    flags += ["--max-context", str(plan.context)]  # the engine reserves for the model's own limit otherwise
    flags += ["--max-batch-size", str(max(1, -(-plan.streams // len(layout.replicas))))] if plan.streams > 1 else []
    defaults = {"dtype": "auto", "dequantize": "auto", "kv_dtype": "auto", "prefill_chunk": None,
                "memory_fraction": 0.85}
    for name, default in defaults.items():
        value = getattr(asked, name)
        flags += [f"--{name.replace('_', '-')}", str(value)] if value != default else []
    return flags


def commands(layout: Layout, flags: Sequence[str], machines: Sequence[Machine], asked: Asked) -> list[str]:
    """What to type so that the model is served by the machines that were chosen, in their order."""
    chosen, where = list(layout.machines), []
    serve = ["tandem serve", shlex.quote(asked.model)]
    serve += ["--revision", shlex.quote(asked.revision)] if asked.revision else []
    serve += ["--hardware-profile", shlex.quote(asked.profile)] if asked.profile and len(chosen) > 1 else []
    if asked.hostfile and not asked.hosts:
        where = ["--hostfile", shlex.quote(asked.hostfile)]
        if chosen != list(range(len(machines))):
            where += ["--host-entries", ",".join(map(str, chosen))]
        return [" ".join([*serve, *where, *flags])]
    if not asked.hosts:
        return [" ".join([*serve, *flags])]
    hosts = json.dumps([{"ssh": machines[i].name} for i in chosen])
    return [f"echo {shlex.quote(hosts)} > hosts.json   # names for ssh; localhost for this machine",
            " ".join([*serve, "--hostfile hosts.json", *flags])]


def caveats(layout: Layout, machines: Sequence[Machine]) -> list[str]:
    """What the flags leave out."""
    lines = []
    if len(layout.machines) > 1:
        lines.append(f"Ranks in order: {', '.join(machines[i].name for i in layout.machines)}.")
    uneven = [s for stages in layout.replicas for s in stages if _is_uneven(s.shares)]
    if uneven and not _shares(layout):
        lines.append("The stages' machines have different shares, which one --tensor-split cannot say.")
    splits = {tuple(s.layers for s in stages) for stages in layout.replicas}
    if len(splits) > 1:
        lines.append("The replicas have different layer splits: start each with its own --layer-split.")
    return lines


def _shares(layout: Layout) -> tuple[float, ...] | None:
    """The shares that all stages have in common, if they are uneven."""
    found = {s.shares for stages in layout.replicas for s in stages}
    return next(iter(found)) if len(found) == 1 and _is_uneven(next(iter(found))) else None


def _is_uneven(shares: Sequence[float]) -> bool:
    return max(shares) - min(shares) > 1e-6
