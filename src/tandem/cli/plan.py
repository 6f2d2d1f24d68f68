"""`tandem plan`: distribute a model over machines and predict the speed, without loading anything."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.checkpoints import catalogue
from tandem.checkpoints.catalogue import Chosen
from tandem.checkpoints.resolve import known, resolve
from tandem.cli.arguments import filled_in
from tandem.cli.screen import screen
from tandem.config.sizes import counted_memory
from tandem.errors import ConfigError, UsageError
from tandem.launchers.agent.link import PREFIX
from tandem.launchers.agent.trust import Trust
from tandem.launchers.hostfile import read_hostfile
from tandem.models.kv_types import require_quantizable
from tandem.planner.explain import GOALS, LEGEND, Named, caveats, commands, gib, in_words, plan_json, rate, serve_flags
from tandem.planner.hardware import GIB, Machine
from tandem.planner.hosts import Hosts, cluster_of, host_spec, host_specs, read_hosts, this_machine, this_name
from tandem.planner.layouts import parse_layout
from tandem.planner.plan import plan
from tandem.planner.presets import Planned, copied, find, planned, planned_files, presets
from tandem.planner.profile import Cluster, Profile, measured_machine, read_profile
from tandem.planner.types import Candidate, LayoutPlan, NothingFits, Prediction, Request, Stage

_SHOWN = 10
"""Rows of the table without --all; a few of them are layouts that do not fit."""
_SHOWN_UNFIT = 3
_DISCLAIMER = (
    "Estimates from {figures} figures (docs/planning.md): good for comparing layouts, not a promise. Memory is in GiB, "
    "needed/allowed."
)


def print_plan(console: Console, plan: LayoutPlan, cluster: Cluster, request: Request, named: Named, *, all_rows: bool) -> None:
    """Print the compared layouts, the chosen one with reasons, and the command that serves with it."""
    answers = "1 answer" if plan.streams == 1 else f"{plan.streams} answers at once"
    machines = cluster.machines
    title = f"{named.model}: {answers} of {plan.context:,} tokens (a token is about a word), for the {GOALS[plan.goal]}"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    table.add_column("Layout", overflow="fold", ratio=3)
    table.add_column("Layers", overflow="fold", ratio=1)
    table.add_column("Memory", overflow="fold", ratio=3)
    table.add_column("ms/token\n1 answer", justify="right")
    table.add_column("tokens/s\n1 answer", justify="right")
    if plan.streams > 1:
        table.add_column(f"tokens/s\n{plan.streams} answers", justify="right")
    table.add_column("prompt\ntokens/s", justify="right")
    table.add_column("Why", overflow="fold", ratio=4)
    rows = plan.candidates if all_rows else _best(plan)
    for candidate in rows:
        table.add_row(*_row(candidate, plan, machines), style=None if candidate.fits else "dim")
    console.print(table)
    if left := len(plan.candidates) - len(rows):
        console.print(f"{left} more layouts were compared (--all shows them).", markup=False)
    for line in (
        *map(in_words, plan.reasons),
        *([LEGEND] if len(machines) > 1 else []),
        *cluster.notes,
        _DISCLAIMER.format(figures=_figures(machines)),
    ):
        console.print(line, markup=False)
    if plan.chosen is not None and plan.chosen.layout is not None:
        flags = serve_flags(plan, request, named)
        for line in commands(plan.chosen.layout, flags, machines, named):
            console.print(line, markup=False, style="bold", soft_wrap=True)
        for line in caveats(plan.chosen.layout, machines):
            console.print(line, markup=False)
    elif plan.remedies:
        console.print("Would fit:", markup=False)
        for line in plan.remedies:
            console.print(f"- {in_words(line)}", markup=False)


def _figures(machines: Sequence[Machine]) -> str:
    measured = [machine.measured for machine in machines]
    return "measured" if all(measured) else "measured and published" if any(measured) else "published"


def _best(plan: LayoutPlan) -> list[Candidate]:
    """Return the best candidates that fit, and the closest of those that do not."""
    fitting = [c for c in plan.candidates if c.fits]
    others = [c for c in plan.candidates if not c.fits]
    unfit = others[: max(_SHOWN_UNFIT, _SHOWN - len(fitting))]
    return fitting[: _SHOWN - min(_SHOWN_UNFIT, len(unfit))] + unfit


def _row(candidate: Candidate, plan: LayoutPlan, machines: Sequence[Machine]) -> list[str]:
    mark = "*" if candidate is plan.chosen else ""
    prediction, layout = candidate.prediction, candidate.layout
    if prediction is None or layout is None:
        cells = ["", "", "", ""] + ([""] if plan.streams > 1 else []) + [""]
        return [mark, escape(in_words(candidate.label)), *cells, escape(in_words(candidate.reason))]
    layers = " + ".join(_held(s) for s in layout.replicas[0])
    cells = [layers, escape(_memory(prediction, machines)), f"{prediction.step_single * 1e3:.1f}"]
    cells.append(rate(prediction.tokens_single))
    cells += [rate(prediction.tokens)] if plan.streams > 1 else []
    cells.append(f"{prediction.prefill:,.0f}")
    return [mark, escape(in_words(candidate.label)), *cells, escape(in_words(candidate.reason))]


def _memory(prediction: Prediction, machines: Sequence[Machine]) -> str:
    return ", ".join(f"{machines[m.machine].name} {m.needed / GIB:.1f}/{m.budget / GIB:.1f}" for m in prediction.memory)


def _held(stage: Stage) -> str:
    """Return the number of a stage's layers, with the attention heads of its machines where they differ."""
    heads = "+".join(map(str, stage.kv_heads))
    return f"{stage.layers} (heads {heads})" if len(set(stage.kv_heads)) > 1 else str(stage.layers)


def run(arguments: argparse.Namespace) -> int:
    """Plan and print. Return 0. Raises UsageError for wrong arguments, NothingFits after printing the compared layouts."""
    profile = read_profile(arguments.profile) if arguments.profile else None
    hosts, share = _hosts(arguments, profile), arguments.memory_fraction
    machines = [
        dataclasses.replace(one, memory=counted_memory(one.memory, share, arguments.max_memory)) for one in hosts.machines
    ]
    hosts = dataclasses.replace(hosts, machines=machines)
    model = _model(arguments, hosts)
    request = _request(arguments, model)
    cluster = cluster_of(
        hosts,
        arguments.link or [],
        description=model.description,
        request=request,
        fast=arguments.fast_sync != "off",
        profile=profile,
        source=str(arguments.profile),
    )
    if model.note:
        cluster.notes.insert(0, model.note)
    if mapped := model.description.mapped_bytes:
        cluster.notes.append(f"{gib(mapped)} of n-gram tables are read from the model's files row by row, and take no memory.")
    try:
        answer = plan(model.description, cluster.machines, cluster.links, request, experts=model.experts)
    except NothingFits as refusal:
        _show(arguments, refusal.plan, cluster, request)
        raise
    _show(arguments, answer, cluster, request)
    return 0


def _model(arguments: argparse.Namespace, hosts: Hosts) -> Planned:
    """Return the model of a preset or of files; a name of the catalogue is the copy that `tandem serve` would choose.

    Raises ConfigError for --quant with files, whose weights are fixed.
    """
    room = int(sum(machine.memory for machine in hosts.machines) * arguments.memory_fraction)
    if (chosen := _chosen(arguments, room)) is not None:
        asked, arguments.model, arguments.quant = arguments.quant, chosen.id, None
        preset = next(filter(None, map(find, chosen.model.names)), None)
        if preset is not None:
            native = preset[1].native is not None and chosen.quant == "mxfp4"
            found = planned(*preset, "native" if native else chosen.quant)
            return dataclasses.replace(found, copy=chosen.id, note=found.note if asked else chosen.line)
    name, stored = copied(arguments.model)
    preset = None if stored and arguments.quant else find(name)
    if preset is not None and arguments.revision is None and not Path(arguments.model).exists():
        found = planned(*preset, stored or arguments.quant or "native")
        arguments.model = found.copy or preset[0]  # the hub id, which `tandem serve` accepts
        return found
    if arguments.quant is not None:
        raise ConfigError(
            f"--quant {arguments.quant}: {arguments.model} is planned for as its files are; leave --quant out, or name "
            f"one of the models of docs/planning.md{_meant(arguments.model)}",
            param="quant",
        )
    return planned_files(resolve(arguments.model, revision=arguments.revision, weights=False))


def _chosen(arguments: argparse.Namespace, room: int) -> Chosen | None:
    """Return the copy that a name of the catalogue stands for; None for another name, a revision, or weights of no copy."""
    found = None if arguments.revision else catalogue.find(arguments.model)
    if found is None or (arguments.quant is not None and arguments.quant not in found[0].copies):
        return None
    return known(arguments.model, lambda: room, arguments.quant)


def _meant(model: str) -> str:
    """Return `(did you mean ...?)` with the most similar preset, or an empty string."""
    names = {name.rpartition("/")[2].lower(): name for name in presets()}
    near = difflib.get_close_matches(model.rpartition("/")[2].lower(), list(names), 1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def _hosts(arguments: argparse.Namespace, profile: Profile | None) -> Hosts:
    if arguments.hosts or arguments.hostfile:
        specs = host_specs(arguments.hosts or [])
        return read_hosts([*_asked(arguments.hostfile, specs, profile), *specs], arguments.hostfile, profile)
    if profile is None or not profile.hosts:
        return this_machine()
    if len(profile.hosts) > 1:
        arguments.hosts = [host.name for host in profile.hosts]  # so that the printed command names them
    return Hosts(machines=[measured_machine(host) for host in profile.hosts])


def _asked(hostfile: str | None, specs: Sequence[str], profile: Profile | None) -> list[str]:
    """Return memory and chip of the machines of a hosts file that nothing tells them of, asked there; none if one is away."""
    told = {spec.partition("=")[0] for spec in specs}
    hosts = () if hostfile is None else read_hostfile(hostfile).hosts
    names = [host.ssh for host in hosts if not host.facts and host.ssh not in told and not (profile and profile.host(host.ssh))]
    if names:
        from tandem.cli.hosts.command import gather_facts  # imports the doctor's probes

        with suppress(UsageError):
            return [host_spec(name, one.memory_bytes, one.chip) for name, one in gather_facts(names).items()]
    return []


def _request(arguments: argparse.Namespace, model: Planned) -> Request:
    description = model.description
    if arguments.context is not None and arguments.context > description.max_context:
        raise ConfigError(
            f"--context {arguments.context}: the model was made for {description.max_context}; choose at most that",
            param="context",
        )
    if arguments.kv_dtype != "auto":
        require_quantizable(description, arguments.kv_dtype)
    if arguments.max_loras > 0 and not model.lora_elements:
        raise ConfigError(
            f"--max-loras {arguments.max_loras}: adapters are counted from a model's files; name a directory with them",
            param="max_loras",
        )
    layouts = tuple(parse_layout(text) for text in arguments.layout or ())
    return filled_in(Request, arguments, layouts=layouts, lora_elements=model.lora_elements)


def _show(arguments: argparse.Namespace, answer: LayoutPlan, cluster: Cluster, request: Request) -> None:
    machines = cluster.machines
    reached = {this_name(): "localhost", **{name: PREFIX + name for name in Trust("head").peers()}}
    new = "plan-hosts.json" if Path("hosts.json").exists() else "hosts.json"
    named = filled_in(Named, arguments, new_hostfile=new, reached=reached)
    if arguments.json:
        serve = None if answer.chosen is None else serve_flags(answer, request, named)
        fitting = [one for one in answer.candidates if one.fits and one.layout is not None and one.prediction is not None]
        print(
            json.dumps(
                {
                    "model": named.model,
                    "machines": [dataclasses.asdict(m) for m in machines],
                    "links": [dataclasses.asdict(link) for link in cluster.links],
                    **plan_json(answer, machines),
                    "serve": serve,
                    "flags": {one.label: serve_flags(dataclasses.replace(answer, chosen=one), request, named) for one in fitting},
                    "notes": cluster.notes,
                },
                indent=2,
            )
        )
        return
    console = screen(highlight=False)
    print_plan(console, answer, cluster, request, named, all_rows=arguments.all)
