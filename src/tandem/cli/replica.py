"""`tandem replica`: look at the replicas of a running server, add one, or drain one."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.table import Table

from tandem.cli.address import local_port, server_url
from tandem.cli.screen import screen
from tandem.errors import UsageError
from tandem.protocol.control import EngineStatus
from tandem.protocol.supervisor import AddReplica, Done, DrainReplica, ListReplicas, ReplicaInfo, ReplicaList
from tandem.supervision.control import ask, control_path
from tandem.supervision.probe import StatusProbe

PROBE_S = 3.0
"""Seconds that an engine gets to say how it is: on a busy machine more than one."""


def run(arguments: argparse.Namespace) -> int:
    """One of the actions. Raises UsageError."""
    path = control_path(local_port(server_url(arguments)))
    if arguments.action == "list":
        _show(_list(path))
    elif arguments.action == "add":
        reply = ask(path, AddReplica(arguments.role))
        assert isinstance(reply, Done)
        print(f"replica {reply.replica} is starting; it takes requests when `tandem replica list` shows it as ready")
    else:
        _drain(path, arguments.replica)
    return 0


def _list(path: Path) -> list[tuple[ReplicaInfo, EngineStatus | None]]:
    """All replicas, and what their engines say."""
    reply = ask(path, ListReplicas())
    assert isinstance(reply, ReplicaList)
    probes = [StatusProbe(info.endpoint) for info in reply.replicas]
    try:
        return [(info, probe.ask(PROBE_S) if info.pid is not None else None)
                for info, probe in zip(reply.replicas, probes, strict=True)]
    finally:
        for probe in probes:
            probe.close()


def _state(info: ReplicaInfo, status: EngineStatus | None) -> str:
    if info.state != "running":
        return info.state
    return "unreachable" if status is None else status.state


def _show(replicas: list[tuple[ReplicaInfo, EngineStatus | None]]) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("replica", "role", "state", "pid", "running", "waiting", "ranks", "restarts"):
        table.add_column(heading, justify="left" if heading in ("role", "state") else "right")
    for info, status in replicas:
        counts = ("-",) * 3 if status is None else (status.running, status.queued, len(status.ranks))
        table.add_row(str(info.replica), info.role, _state(info, status), str(info.pid or "-"), *map(str, counts),
                      str(info.restarts))
    screen().print(table)


def _drain(path: Path, replica: int) -> None:
    others = [_state(info, status) for info, status in _list(path) if info.replica != replica]
    if others and "ready" not in others:
        raise UsageError(f"no other replica than {replica} is ready ({', '.join(others)}); wait until one is")
    ask(path, DrainReplica(replica))
    print(f"replica {replica} drains: it gets no new requests and ends when it has none left")
