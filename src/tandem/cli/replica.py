"""`tandem replica`: list the replicas of a running server, add one, or drain one."""

from __future__ import annotations

import argparse

from tandem.cli.address import local_port, server_url
from tandem.cli.screen import replicas_table, screen
from tandem.cli.status import as_json, look_at_port
from tandem.errors import UsageError
from tandem.protocol.supervisor import AddReplica, Done, DrainReplica
from tandem.supervision.control_socket import ask, control_path


def run(arguments: argparse.Namespace) -> int:
    """Run the action. Raises UsageError."""
    port = local_port(server_url(arguments))
    if arguments.action == "list":
        screen(markup=False).print(replicas_table(as_json(look_at_port(port))["replicas"]))
    elif arguments.action == "add":
        reply = ask(control_path(port), AddReplica(arguments.role))
        assert isinstance(reply, Done)
        print(f"replica {reply.replica} is starting; it takes requests when `tandem replica list` shows it as ready")
    else:
        _drain(port, arguments.replica)
    return 0


def _drain(port: int, replica: int) -> None:
    others = [other.state for other in look_at_port(port).replicas if other.info.replica != replica]
    if others and "ready" not in others:
        raise UsageError(f"no other replica than {replica} is ready ({', '.join(others)}); wait until one is")
    ask(control_path(port), DrainReplica(replica))
    print(f"replica {replica} drains: it gets no new requests and ends when it has none left")
