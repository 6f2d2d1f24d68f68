"""The options of commands for servers in the background, for a service, for kept prefixes, and for shells."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from tandem.cli.arguments import Parser, add_command, add_settings
from tandem.cli.options.bench import add_server

ACTIONS = {
    "list": "List the prefixes in memory, and how much of each is on disk; or what is in a directory.",
    "info": "Say how much is kept, where, and how often it served.",
    "warm": "Compute a prompt before users come, at every replica: a system prompt, a repository's context, a chat.",
    "drop": "Let go of what is kept, in memory and on disk.",
}


def add_cache(commands: Any) -> Parser:
    """Add `cache` with its actions; each sets `action`. The caller sets `run`."""
    cache = add_command(commands, "cache",
                        "See, warm and drop the prefixes that a running server keeps, in memory and on disk.")
    actions = cache.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    for name, text in ACTIONS.items():
        parser = add_command(actions, name, text)
        if name == "warm":
            parser.add_argument("file", metavar="FILE", help="a text; or .json with a chat request or its messages; or "
                                ".jsonl with one of these, or a message, on each line; - is a text from standard "
                                "input.")
            parser.add_argument("--role", choices=("system", "user", "none"), default="system", help="what a text is: "
                                "the system message, the beginning of the first user's message, or, with none, of "
                                "prompts to /v1/completions [system]")
        if name == "drop":
            parser.add_argument("--tier", choices=("memory", "all"), default="all", help="memory: what is on disk "
                                "stays there, and is read again [all]")
            parser.add_argument("--unused-days", type=float, metavar="DAYS", help="with --kv-disk: only what nobody "
                                "has used for so long.")
        if name != "warm":
            parser.add_argument("--kv-disk", metavar="DIR", help="this directory, of all servers that use it, in place "
                                "of a server.")
        parser.add_argument("--model", metavar="NAME", help="of a server with several: this one.")
        add_server(parser)
    return cache


SHELLS = ("bash", "zsh", "fish")


def add_completions(commands: Any, run: Any) -> None:
    """Add `completions`."""
    completions = add_command(commands, "completions", "Print a script that completes this command's words in a shell.")
    completions.add_argument("shell", choices=SHELLS, help='bash and zsh: eval "$(tandem completions bash)" in '
                             "~/.bashrc or ~/.zshrc; fish: tandem completions fish | source.")
    completions.set_defaults(run=run)


def add_service(commands: Any, sections: Sequence[str], run: Any) -> None:
    """Add `service`; `run` takes the parsed arguments, whose `action` says what to do."""
    service = add_command(commands, "service", "Have the system keep a server running: by launchd on macOS, by systemd "
                          "on Linux.")
    actions = service.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    install = add_command(actions, "install", "Install it with the options of `tandem serve`, and start it.")
    add_settings(install, sections)
    uninstall = add_command(actions, "uninstall", "Stop it, and take it away.")
    status = add_command(actions, "status", "Say whether it is installed and runs; exit code 0 if it does.")
    for parser in (install, uninstall, status):
        parser.add_argument("--name", default="default", help="of the service, where there are several [default]")
    service.set_defaults(run=run)


def add_lifecycle(commands: Any, sections: Sequence[str], run: Any) -> None:
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
