"""A plan as a table and as JSON."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.planner.as_json import plan_json
from tandem.planner.commands import caveats, commands, serve_flags
from tandem.planner.hardware import GIB, Machine
from tandem.planner.types import Candidate, LayoutPlan, Prediction, Stage
from tandem.planner.words import rate

_SHOWN = 10
"""Rows of the table without --all; a few of them are layouts that do not fit."""
_SHOWN_UNFIT = 3
_DISCLAIMER = (
    "Estimates from {figures} figures (docs/planning.md): good for comparing layouts, not a promise. Memory is in GiB, "
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
    for line in (*plan.reasons, *notes, _DISCLAIMER.format(figures=_figures(machines))):
        console.print(line, markup=False)
    if plan.chosen is not None and plan.chosen.layout is not None:
        flags = serve_flags(plan, arguments)
        for line in commands(plan.chosen.layout, flags, machines, arguments):
            console.print(line, markup=False, style="bold", soft_wrap=True)
        for line in caveats(plan.chosen.layout, machines):
            console.print(line, markup=False)
    elif plan.remedies:
        console.print("Would fit:", markup=False)
        for line in plan.remedies:
            console.print(f"- {line}", markup=False)


def _figures(machines: Sequence[Machine]) -> str:
    measured = [one.measured for one in machines]
    return "measured" if all(measured) else "measured and nominal" if any(measured) else "nominal"


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
