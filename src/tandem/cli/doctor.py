"""`tandem doctor`: what is wrong with the machines, and how to mend it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.cli.screen import screen
from tandem.doctor.checks_ray import hosts_of
from tandem.doctor.examine import Question, examine, findings
from tandem.doctor.findings import Evidence, Finding, Host
from tandem.doctor.memory_plan import PlanRequest
from tandem.doctor.session import PROBE
from tandem.errors import ConfigError
from tandem.launchers.hostfile import Hostfile, read_hostfile
from tandem.launchers.ray.driver import ray_command, ray_nodes
from tandem.planner.layouts import parse_layout

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_MOST_PORTS = 1000


def run(arguments: argparse.Namespace) -> int:
    """Examine and print; 1 if a check failed. Raises UsageError."""
    question = _question(arguments)
    console = Console(stderr=True)
    if sys.stderr.isatty() and not arguments.json:
        with console.status("starting") as status:
            evidence = examine(question, status.update)
    else:
        evidence = examine(question)
    found = findings(evidence)
    if arguments.json:
        print(json.dumps(_as_json(evidence, found), indent=2))
    else:
        _print(evidence, found, verbose=arguments.verbose)
    return int(any(one.verdict == "fail" for one in found))


def _question(arguments: argparse.Namespace) -> Question:
    if arguments.ray and arguments.hostfile:
        raise ConfigError("--ray and --hostfile: give one of them", param="ray")
    file = read_hostfile(arguments.hostfile) if arguments.hostfile else None
    nodes, token = ray_nodes(None if arguments.ray == "auto" else arguments.ray) if arguments.ray else (None, False)
    hosts = _hosts(file, arguments.remote_python) if file else []
    if nodes is not None:
        hosts = hosts_of(nodes, {one.node_id: tuple(ray_command(arguments.ray, one.node_id, PROBE, token=token))
                                 for one in nodes})
    backend = arguments.backend or (file.backend if file else None) or "ring"
    if arguments.layout:
        parse_layout(arguments.layout)  # said at once, not after all has been gathered
    return Question(
        hosts=hosts, ray=nodes, backend=backend,
        variables=dict(file.envs) if file else {},
        model=arguments.model, weights_from_head=arguments.weights_from == "head", full_hash=arguments.full_hash,
        plan=PlanRequest(arguments.layout, arguments.context, arguments.streams), port=arguments.port,
        ports=parse_ports(arguments.ports))


def _hosts(file: Hostfile, python: str | None) -> list[Host]:
    """A machine may stand in the file several times, once for each of its ranks."""
    ranks = Counter(one.ssh for one in file.hosts)
    first = {one.ssh: one for one in reversed(file.hosts)}
    return [Host(name, one.ips[0] if one.ips else "", one.rdma, ranks[name], one.python or python)
            for name, one in ((name, first[name]) for name in ranks)]


def parse_ports(text: str | None) -> list[int]:
    """Ports of `A-B` or `A`. Raises ConfigError."""
    if text is None:
        return []
    first, _, last = text.partition("-")
    try:
        ports = list(range(int(first), int(last or first) + 1))
    except ValueError:
        ports = []
    if not ports or len(ports) > _MOST_PORTS or not 1 <= ports[0] <= ports[-1] <= 65535:
        raise ConfigError(f"--ports {text}: write one port or a range such as 32323-32330, at most {_MOST_PORTS} ports",
                          param="ports")
    return ports


def _print(evidence: Evidence, found: Sequence[Finding], *, verbose: bool) -> None:
    console = screen(highlight=False)
    table = Table(title=f"{len(evidence.hosts)} machine(s): {', '.join(one.name for one in evidence.hosts)}",
                  title_justify="left")
    table.add_column("Check")
    table.add_column("")
    table.add_column("Where", overflow="fold")
    table.add_column("Found", overflow="fold")
    skipped = [] if verbose else [one for one in found if one.verdict == "skip"]
    for one in found:
        if one in skipped:
            continue
        table.add_row(one.check, f"[{_STYLES[one.verdict]}]{one.verdict}", escape(one.where), escape(one.detail))
    console.print(table)
    if skipped:
        names = ", ".join(dict.fromkeys(one.check for one in skipped))
        console.print(f"Does not apply here: {names} (--verbose says why).", markup=False, style="dim")
    for one in found:
        if one.remedy and one.verdict in ("warn", "fail"):
            console.print(f"{one.check}{f' ({one.where})' if one.where else ''}: {one.detail}", markup=False)
            console.print(f"    {one.remedy}", markup=False, style="bold", soft_wrap=True)
    failed = sum(one.verdict == "fail" for one in found)
    console.print(f"{failed} check(s) failed." if failed else "Nothing is wrong.")


def _as_json(evidence: Evidence, found: Sequence[Finding]) -> dict[str, object]:
    links = [{"from": a, "to": b, "error": link.error, "latency_s": link.latency_s, "bytes_per_s": link.bandwidth}
             for (a, b), link in evidence.links.items()]
    return {"ok": not any(one.verdict == "fail" for one in found),
            "hosts": [{"name": one.name, "address": one.address} for one in evidence.hosts],
            "findings": [dataclasses.asdict(one) for one in found], "links": links,
            "all_sum": {name: {"error": one.error, "latency_s": one.latency_s}
                        for name, one in evidence.collected.items()}}
