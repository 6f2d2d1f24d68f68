"""`tandem plan`: which machines would hold which part of a model, and how fast; nothing is loaded."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
from pathlib import Path
from typing import Any

from tandem.checkpoints.resolve import resolve
from tandem.cli.plan.output import as_json, print_plan
from tandem.cli.screen import screen
from tandem.errors import ConfigError
from tandem.models.description import ModelDescription, describe
from tandem.models.kv_types import require_quantizable
from tandem.planner.experts import read_experts
from tandem.planner.hosts import Hosts, read_hosts, read_links, this_machine
from tandem.planner.manual import parse_layout
from tandem.planner.measured import Cluster, measured_machine, with_profile
from tandem.planner.plan import plan
from tandem.planner.presets import Planned, find, planned, presets
from tandem.planner.profile import Profile, read_profile
from tandem.planner.types import LayoutPlan, NothingFits, Request


def run(arguments: argparse.Namespace) -> int:
    """Plan and print. Raises UsageError for wrong arguments, `NothingFits` after printing what was compared."""
    profile = read_profile(arguments.profile) if arguments.profile else None
    model = _model(arguments)
    request = _request(arguments, model.description)
    cluster = _cluster(arguments, profile, model.description, request)
    notes = [model.note, *cluster.notes] if model.note else cluster.notes
    try:
        answer = plan(model.description, cluster.machines, cluster.links, request, experts=model.experts)
    except NothingFits as refusal:
        _show(arguments, refusal.plan, cluster, notes)
        raise
    _show(arguments, answer, cluster, notes)
    return 0


def _model(arguments: argparse.Namespace) -> Planned:
    """The model of a preset, or of files. Raises ConfigError for --quant with files: they are as they are."""
    preset = find(arguments.model)
    if preset is not None and arguments.revision is None and not Path(arguments.model).exists():
        found = planned(*preset, arguments.quant or "native")
        arguments.model = found.copy or preset[0]  # the hub id, which `tandem serve` takes
        return found
    if arguments.quant is not None:
        raise ConfigError(
            f"--quant {arguments.quant}: {arguments.model} is planned for as its files are; leave --quant out, or name "
            f"one of the models of docs/planning.md{_meant(arguments.model)}",
            param="quant",
        )
    files = resolve(arguments.model, revision=arguments.revision, weights=False)
    description = describe(files)
    return Planned(description, read_experts(files, description), "")


def _meant(model: str) -> str:
    """The preset that a name may mean."""
    names = {name.rpartition("/")[2].lower(): name for name in presets()}
    near = difflib.get_close_matches(model.rpartition("/")[2].lower(), list(names), 1)
    return f" (did you mean {names[near[0]]}?)" if near else ""


def _cluster(arguments: argparse.Namespace, profile: Profile | None, description: ModelDescription, request: Request
             ) -> Cluster:  # fmt: skip
    """Machines and links as they were named, with the profile's figures, or else with the fences that are set."""
    hosts = _hosts(arguments, profile)
    links, notes = read_links(arguments.link or [], hosts, profile)
    found = with_profile(hosts.machines, links, profile, description=description, request=request,
                         fast=arguments.fast_sync != "off", backend=hosts.backend, source=str(arguments.profile))
    return dataclasses.replace(found, notes=[*hosts.notes, *notes, *found.notes])


def _hosts(arguments: argparse.Namespace, profile: Profile | None) -> Hosts:
    if arguments.hosts or arguments.hostfile:
        return read_hosts(arguments.hosts or [], arguments.hostfile, profile)
    if profile is None or not profile.hosts:
        return this_machine()
    if len(profile.hosts) > 1:
        arguments.hosts = [one.name for one in profile.hosts]  # the command that is printed names them
    return Hosts(machines=[measured_machine(one) for one in profile.hosts])


def _request(arguments: argparse.Namespace, description: ModelDescription) -> Request:
    if arguments.context is not None and arguments.context > description.max_context:
        raise ConfigError(
            f"--context {arguments.context}: the model was made for {description.max_context}; choose at most that",
            param="context",
        )
    if arguments.kv_dtype != "auto":
        require_quantizable(description, arguments.kv_dtype)
    return Request(
        context=arguments.context,
        streams=arguments.streams,
        goal=arguments.goal,
        dtype=arguments.dtype,
        dequantize=arguments.dequantize,
        kv_dtype=arguments.kv_dtype,
        prefill_chunk=arguments.prefill_chunk,
        memory_fraction=arguments.memory_fraction,
        layouts=tuple(parse_layout(text) for text in arguments.layout or ()),
    )


def _show(arguments: argparse.Namespace, answer: LayoutPlan, cluster: Cluster, notes: list[str]) -> None:
    machines = cluster.machines
    if arguments.json:
        facts: dict[str, Any] = {"model": arguments.model, "machines": [dataclasses.asdict(m) for m in machines],
                                 "links": [dataclasses.asdict(link) for link in cluster.links]}
        print(json.dumps({**facts, **as_json(answer, machines, arguments), "notes": notes}, indent=2))
        return
    console = screen(highlight=False)
    print_plan(console, answer, machines, arguments, notes)
