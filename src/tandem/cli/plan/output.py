"""A plan as a table, as JSON, and as flags of `tandem serve`."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.config.options import options
from tandem.planner.as_json import plan_json
from tandem.planner.hardware import GIB, Machine
from tandem.planner.types import Candidate, Layout, LayoutPlan, Prediction, Stage
from tandem.planner.words import rate

_SHOWN = 10
"""Rows of the table without --all; a few of them are layouts that do not fit."""
_SHOWN_UNFIT = 3
_DISCLAIMER = (
    "Estimates from nominal figures (docs/planning.md): good for comparing layouts, not a promise. Memory is in GiB, "
    "needed/allowed."
)


def print_plan(
    console: Console, plan: LayoutPlan, machines: Sequence[Machine], arguments: argparse.Namespace, notes: Sequence[str]
) -> None:
    """The layouts compared, the one chosen and why, and how to serve with it."""
    streams = f"{plan.streams} stream{'s' if plan.streams > 1 else ''}"
    title = f"{arguments.model}: {streams} of {plan.context:,} tokens, for {plan.goal}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("Layout", overflow="fold", ratio=3)
    table.add_column("Layers", overflow="fold", ratio=1)
    table.add_column("Memory", overflow="fold", ratio=3)
    table.add_column("ms/token\n1 stream", justify="right")
    table.add_column("tokens/s\n1 stream", justify="right")
    if plan.streams > 1:
        table.add_column(f"tokens/s\n{plan.streams} streams", justify="right")
    table.add_column("prompt\ntokens/s", justify="right")
    table.add_column("Why", overflow="fold", ratio=4)
    rows = plan.candidates if arguments.all else _best(plan)
    for candidate in rows:
        table.add_row(*_row(candidate, plan, machines), style=None if candidate.fits else "dim")
    console.print(table)
    if left := len(plan.candidates) - len(rows):
        console.print(f"{left} more layouts were compared (--all shows them).", markup=False)
    for line in (*plan.reasons, *notes, _DISCLAIMER):
        console.print(line, markup=False)
    if plan.chosen is not None and plan.chosen.layout is not None:
        flags = serve_flags(plan, arguments)
        for line in commands(plan.chosen.layout, flags, machines, arguments):
            console.print(line, markup=False, style="bold", soft_wrap=True)
        for line in caveats(plan.chosen.layout, flags, machines):
            console.print(line, markup=False)
    elif plan.remedies:
        console.print("Would fit:", markup=False)
        for line in plan.remedies:
            console.print(f"- {line}", markup=False)


def serve_flags(plan: LayoutPlan, arguments: argparse.Namespace) -> list[str]:
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
    if arguments.fast_sync != "off":
        flags += ["--fast-sync", arguments.fast_sync]
    if shares := _shares(layout):
        flags += ["--tensor-split", ",".join(f"{x:g}" for x in shares)]
    flags += ["--expert-parallel"] if any(s.whole_experts for one in layout.replicas for s in one) else []
    if len(stages) > 1:
        flags += ["--layer-split", ",".join(str(s.layers) for s in stages)]
        flags += ["--lanes", str(prediction.lanes)] if plan.streams > 1 and prediction.lanes != len(stages) else []
    flags += ["--max-context", str(plan.context)]  # the engine reserves for the model's own limit otherwise
    flags += ["--max-batch-size", str(max(1, -(-plan.streams // len(layout.replicas))))] if plan.streams > 1 else []
    defaults = {"dtype": "auto", "dequantize": "auto", "prefill_chunk": None, "memory_fraction": 0.85}
    for name, default in defaults.items():
        value = getattr(arguments, name)
        flags += [f"--{name.replace('_', '-')}", str(value)] if value != default else []
    return flags


def commands(layout: Layout, flags: Sequence[str], machines: Sequence[Machine],
             arguments: argparse.Namespace) -> list[str]:
    """What to type so that the model is served by the machines that were chosen, in their order."""
    chosen, where = list(layout.machines), []
    if arguments.hostfile and not arguments.hosts:
        where = ["--hostfile", shlex.quote(arguments.hostfile)]
        if chosen != list(range(len(machines))):
            where += ["--host-entries", ",".join(map(str, chosen))]
        return [" ".join(["tandem serve", arguments.model, *where, *flags])]
    if not arguments.hosts:
        return [" ".join(["tandem serve", arguments.model, *flags])]
    hosts = json.dumps([{"ssh": machines[i].name} for i in chosen])
    return [f"echo {shlex.quote(hosts)} > hosts.json   # names for ssh; localhost for this machine",
            " ".join(["tandem serve", arguments.model, "--hostfile hosts.json", *flags])]


def caveats(layout: Layout, flags: Sequence[str], machines: Sequence[Machine]) -> list[str]:
    """What the flags leave out."""
    lines = []
    known = {option.flag for option in options()}
    if missing := [f for f in flags if f.startswith("--") and f not in known]:
        lines.append(f"This version's `tandem serve` does not have {', '.join(missing)} yet.")
    if len(layout.machines) > 1:
        lines.append(f"Ranks in order: {', '.join(machines[i].name for i in layout.machines)}.")
    uneven = [s for stages in layout.replicas for s in stages if _is_uneven(s.shares)]
    if uneven and not _shares(layout):
        lines.append("The stages' machines have different shares, which one --tensor-split cannot say.")
    splits = {tuple(s.layers for s in stages) for stages in layout.replicas}
    if len(splits) > 1:
        lines.append("The replicas have different layer splits: start each with its own --layer-split.")
    return lines


def as_json(plan: LayoutPlan, machines: Sequence[Machine], arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan in types that JSON has, with the flags that serve it."""
    return {**plan_json(plan, machines), "serve": None if plan.chosen is None else serve_flags(plan, arguments)}


def _best(plan: LayoutPlan) -> list[Candidate]:
    """The best rows that fit, and the closest of those that do not."""
    fitting = [c for c in plan.candidates if c.fits]
    others = [c for c in plan.candidates if not c.fits]
    unfit = others[: max(_SHOWN_UNFIT, _SHOWN - len(fitting))]
    return fitting[: _SHOWN - min(_SHOWN_UNFIT, len(unfit))] + unfit


def _row(candidate: Candidate, plan: LayoutPlan, machines: Sequence[Machine]) -> list[str]:
    mark = "*" if candidate is plan.chosen else ""
    prediction, layout = candidate.prediction, candidate.layout
    if prediction is None or layout is None:
        cells = ["", "", "", ""] + ([""] if plan.streams > 1 else []) + [""]
        return [mark, escape(candidate.label), *cells, escape(candidate.reason)]
    layers = " + ".join(_held(s) for s in layout.replicas[0])
    cells = [layers, escape(_memory(prediction, machines)), f"{prediction.step_single * 1e3:.1f}"]
    cells.append(rate(prediction.tokens_single))
    cells += [rate(prediction.tokens)] if plan.streams > 1 else []
    cells.append(f"{prediction.prefill:,.0f}")
    return [mark, escape(candidate.label), *cells, escape(candidate.reason)]


def _memory(prediction: Prediction, machines: Sequence[Machine]) -> str:
    return ", ".join(f"{machines[m.machine].name} {m.needed / GIB:.1f}/{m.budget / GIB:.1f}" for m in prediction.memory)


def _held(stage: Stage) -> str:
    """Layers of a stage, with the kv heads of its machines where they differ."""
    heads = "+".join(map(str, stage.kv_heads))
    return f"{stage.layers} (kv {heads})" if len(set(stage.kv_heads)) > 1 else str(stage.layers)


def _shares(layout: Layout) -> tuple[float, ...] | None:
    """The shares that all stages have in common, if they are uneven."""
    found = {s.shares for stages in layout.replicas for s in stages}
    return next(iter(found)) if len(found) == 1 and _is_uneven(next(iter(found))) else None


def _is_uneven(shares: Sequence[float]) -> bool:
    return max(shares) - min(shares) > 1e-6
