"""`tandem doctor`: find problems of the machines, and print a remedy for each."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import starmap

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tandem.cli.arguments import Parser
from tandem.cli.options.machines import add_selftest
from tandem.cli.screen import screen
from tandem.diagnostics.doctor.checks_apple import described
from tandem.diagnostics.doctor.evidence import Evidence, Finding
from tandem.diagnostics.doctor.examine import PlanRequest, Question, examine, findings, hostfile_hosts, hosts_of
from tandem.diagnostics.doctor.probe_session import PROBE
from tandem.engine.ipc_server import is_heard
from tandem.errors import ConfigError
from tandem.launchers.hostfile import read_hostfile
from tandem.launchers.ray.driver import ray_command, ray_nodes
from tandem.planner.layouts import parse_layout
from tandem.supervision.control_socket import control_path

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
_PLAIN = {"accelerators": "M5 chip", "all_sum": "sums", "fences": "GPU setting", "ssh": "answers", "subnets": "addresses"}
"""Names of checks in the table, where they differ from those of --verbose and --json."""
_MOST_PORTS = 1000


def run(arguments: argparse.Namespace) -> int:
    """Examine the machines and print the findings; return 1 if a check failed, else 0. Raises UsageError."""
    if arguments.deep and (arguments.json or arguments.ray):
        raise ConfigError("--deep: goes with neither --json nor --ray; leave them out", param="deep")
    question = _question(arguments)
    if sys.stderr.isatty() and not arguments.json:
        with Console(stderr=True).status("starting") as status:
            evidence = examine(question, status.update)
    else:
        evidence = examine(question)
    seen = findings(evidence)
    if arguments.json:
        print(json.dumps(_as_json(evidence, seen), indent=2))
    else:
        _print(evidence, seen, verbose=arguments.verbose)
    failed = any(finding.verdict == "fail" for finding in seen)
    code = _selftest(arguments) if arguments.deep else 0
    return 1 if failed else code


def _selftest(arguments: argparse.Namespace) -> int:
    """Run the self-test on the same machines, with its own defaults."""
    from tandem.cli.selftest import run as selftest

    parser = Parser()
    add_selftest(parser)
    words = [word for flag in ("hostfile", "model") if (value := getattr(arguments, flag)) for word in (f"--{flag}", value)]
    return selftest(parser.parse_args(words))


def _question(arguments: argparse.Namespace) -> Question:
    if arguments.ray and arguments.hostfile:
        raise ConfigError("--ray and --hostfile: give one of them", param="ray")
    file = read_hostfile(arguments.hostfile) if arguments.hostfile else None
    nodes, token = ray_nodes(None if arguments.ray == "auto" else arguments.ray) if arguments.ray else (None, False)
    hosts = hostfile_hosts(file, arguments.remote_python) if file else []
    if nodes is not None:
        hosts = hosts_of(
            nodes, {node.node_id: tuple(ray_command(arguments.ray, node.node_id, PROBE, token=token)) for node in nodes}
        )
    backend = arguments.backend or (file.backend if file else None) or "ring"
    if arguments.layout:
        parse_layout(arguments.layout)  # reports a mistake now, not after gathering all facts
    return Question(
        hosts=hosts,
        ray=nodes,
        backend=backend,
        variables=dict(file.envs) if file else {},
        model=arguments.model,
        weights_from_head=arguments.weights_from == "head",
        full_hash=arguments.full_hash,
        plan=PlanRequest(arguments.layout, arguments.context, arguments.streams),
        port=arguments.port,
        own_server=is_heard(control_path(arguments.port)),
        ports=parse_ports(arguments.ports),
    )


def parse_ports(text: str | None) -> list[int]:
    """Return the ports of `A-B` or `A`; empty for None. Raises ConfigError."""
    if text is None:
        return []
    first, _, last = text.partition("-")
    try:
        ports = range(int(first), int(last or first) + 1)
    except ValueError:
        ports = range(0)
    if not 1 <= ports.start < ports.stop <= min(65536, ports.start + _MOST_PORTS):
        raise ConfigError(
            f"--ports {text}: write one port or a range such as 32323-32330, at most {_MOST_PORTS} ports", param="ports"
        )
    return list(ports)


def _print(evidence: Evidence, lines: Sequence[Finding], *, verbose: bool) -> None:
    console = screen(highlight=False)
    table = Table(
        title=f"{len(evidence.hosts)} machine(s): {', '.join(host.name for host in evidence.hosts)}", title_justify="left"
    )
    table.add_column("Check")
    table.add_column("")
    table.add_column("Where", overflow="fold")
    table.add_column("Found", overflow="fold")
    names = {} if verbose else _PLAIN
    skipped = [] if verbose else [line for line in lines if line.verdict == "skip" and not line.where]
    shown = [replace(line, check=names.get(line.check, line.check)) for line in lines if line not in skipped]
    for line in shown:
        table.add_row(line.check, f"[{_STYLES[line.verdict]}]{line.verdict}", escape(line.where), escape(line.detail))
    console.print(table)
    for mac in starmap(described, evidence.macs.items()):
        text = "{host}: {chip}, macOS {macos} ({build}), ports: {ports}, cables: {cables}".format(**mac)
        console.print(text + (f", fence: {mac['fence']}" if verbose else ""), markup=False)
    if skipped:
        console.print(f"{len(skipped)} more checks do not apply here (--verbose says why).", markup=False, style="dim")
    faults: dict[tuple[str, str], list[Finding]] = {}
    for line in shown:
        if line.remedy and line.verdict in ("warn", "fail"):
            faults.setdefault((line.check, re.sub(r"^on \S+: ", "", line.remedy)), []).append(line)
    for (check, remedy), alike in faults.items():
        where, found = ", ".join(line.where for line in alike), "; ".join(dict.fromkeys(line.detail for line in alike))
        console.print(f"{check}{f' ({where})' if where else ''}: {found}", markup=False)
        remedy = alike[0].remedy if len({line.remedy for line in alike}) == 1 else f"on each: {remedy}"
        command = remedy.replace("   (", "\n    (", 1)  # on a line of its own, it runs as it is printed
        console.print(f"    {command}", markup=False, style="bold", soft_wrap=True)
    failed, warned = (sum(line.verdict == verdict for line in lines) for verdict in ("fail", "warn"))
    well = f"{warned} warning(s), no fault: serving works in spite of them." if warned else "Nothing is wrong."
    console.print(f"{failed} check(s) failed." if failed else well)


def _as_json(evidence: Evidence, lines: Sequence[Finding]) -> dict[str, object]:
    links = [
        {"from": a, "to": b, "error": link.error, "latency_s": link.latency_s, "bytes_per_s": link.bandwidth}
        for (a, b), link in evidence.links.items()
    ]
    return {
        "ok": not any(line.verdict == "fail" for line in lines),
        "hosts": [{"name": host.name, "address": host.address} for host in evidence.hosts],
        "macs": list(starmap(described, evidence.macs.items())),
        "findings": [asdict(line) for line in lines],
        "links": links,
        "all_sum": {name: {"error": times.error, "latency_s": times.latency_s} for name, times in evidence.collected.items()},
    }
