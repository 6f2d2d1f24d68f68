"""Layouts of a model over machines that a client names: seconds of work for the planner."""

from __future__ import annotations

from typing import cast

from msgspec import json

from tandem.checkpoints.resolve import resolve
from tandem.models.description import describe
from tandem.planner.as_json import plan_json
from tandem.planner.commands import Plainly, caveats, commands, serve_flags
from tandem.planner.experts import read_experts
from tandem.planner.hardware import with_fences
from tandem.planner.hosts import read_hosts, read_links
from tandem.planner.plan import plan
from tandem.planner.types import Goal, NothingFits, Request
from tandem.server.workers.tasks import Compare


def compared(task: Compare) -> bytes:
    """The planner's answer as JSON. Raises UsageError."""
    files = resolve(task.model, revision=task.revision, weights=False)
    wanted = Request(context=task.context, streams=task.streams, goal=cast("Goal | None", task.goal))
    cluster = read_hosts(task.hosts, None)
    links, notes = read_links(task.link, cluster)
    description = describe(files)
    machines, counted = with_fences(cluster.machines, fast=False)  # as `tandem plan` does
    try:
        found = plan(description, machines, links, wanted, experts=read_experts(files, description))
    except NothingFits as refusal:
        found = refusal.plan
    told = [*cluster.notes, *notes, *([counted] if counted else [])]
    asked = Plainly(task.model, task.revision, task.hosts)
    layout = None if found.chosen is None else found.chosen.layout
    flags = [] if layout is None else serve_flags(found, asked)
    return json.encode({
        **plan_json(found, machines),
        "notes": told if layout is None else [*told, *caveats(layout, machines)],
        "layers": description.num_layers,
        "serve": None if layout is None else flags,
        "commands": [] if layout is None else commands(layout, flags, machines, asked),
    })
