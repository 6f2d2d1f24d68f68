"""The options of `tandem up`, `down`, `restart`, `status` and `logs`."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tandem.cli.arguments import add_command, add_settings


def add_parsers(commands: Any, sections: Sequence[str], run: Any) -> None:
    """Add the four commands; `run` takes the parsed arguments, whose `command` says which it is."""
    up = add_command(commands, "up", "Start a server in the background, and wait until it is ready.")
    add_settings(up, sections)
    up.add_argument("--no-wait", action="store_true", help="do not wait.")
    down = add_command(commands, "down", "End a server that `tandem up` started.")
    down.add_argument("--now", action="store_true", help="drop requests that are under way.")
    restart = add_command(commands, "restart", "End a server that `tandem up` started, and start it with the same "
                          "settings.")
    restart.add_argument("--now", action="store_true", help="drop requests that are under way.")
    restart.add_argument("--no-wait", action="store_true", help="do not wait until it is ready.")
    status = add_command(commands, "status", "Show running servers: ranks, hosts, memory, tokens/s, restarts.")
    status.add_argument("--url", metavar="URL", help="the server of this machine with this address, however started.")
    status.add_argument("--port", type=int, metavar="N", help="the server on this port, however started.")
    status.add_argument("--interval", type=_seconds, default=1.0, metavar="S",
                        help="seconds over which tokens are counted; 0 leaves them out [1]")
    status.add_argument("--json", action="store_true", help="print what is known as JSON.")
    logs = add_command(commands, "logs", "Print the log of a server that `tandem up` started.")
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing until the server ends.")
    logs.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="lines to begin with [50]")
    for parser in (up, down, restart, logs):
        parser.add_argument("--name", help="of the server, where there are several [default]")
    status.add_argument("--name", help="only this server.")
    for parser in (down, restart, logs, status):
        parser.add_argument("server", nargs="?", metavar="NAME", help="of the server, as with --name.")
    for parser in (up, down, restart, status, logs):
        parser.set_defaults(run=run)


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of lines")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0 to 3600")
    return value
