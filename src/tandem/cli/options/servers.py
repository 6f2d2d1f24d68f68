"""Options of commands about models, background servers, replicas, services, cached prefixes and completions."""

from __future__ import annotations

import argparse
from typing import get_args

from tandem.checkpoints.quantize import FORMATS
from tandem.cli.arguments import SERVE_SECTIONS, Parser, add_actions, add_as_for_serve, add_hostfile, add_server, add_settings
from tandem.config.settings import Role

MODEL_ACTIONS = {
    "get": "Download a model: `demo`, a name such as `llama3.2`, or a hub id (org/name).",
    "search": "Find models by words: those of the catalogue and of the hub, with size, and whether they fit.",
    "convert": "Store a copy of a model with fewer bits a weight, made by mlx-lm, in this machine's cache; print its path.",
    "list": "List the models on this machine: names, sizes, dates; and what is kept for the next start.",
    "show": "Say what a model is: type, layers, context, size, defaults of sampling.",
    "rm": "Remove a model from this machine's caches.",
    "path": "Print the directory of a model that is on this machine.",
    "prune": "Remove what is kept for the next start of models that were not used for long: slices from other "
    "machines, headers, converted GGUF files.",
    "ps": "List the models of a running server, and which are loaded.",
    "load": "Load a model of a running server that has several.",
    "unload": "Unload one, when it has finished what it has; the next request loads it again.",
}
SHORT = {"pull": "get", "search": "search", "list": "list", "ls": "list", "show": "show", "rm": "rm", "ps": "ps"}
"""Ollama's command -> action of `tandem model`."""


def add_model(model: Parser) -> None:
    """Add the actions of `tandem model`."""
    for name, parser in add_actions(model, MODEL_ACTIONS).items():
        add_model_action(parser, name)


def add_model_action(parser: Parser, name: str) -> None:
    """Add the options of one action of `tandem model`."""
    if name in ("ps", "load", "unload"):
        add_server(parser)
    if name == "search":
        parser.add_argument("terms", nargs="*", metavar="WORDS", help="by default all of the catalogue.")
        add_as_for_serve(parser, "hostfile", "memory_fraction", "max_memory")
        parser.add_argument("--json", action="store_true", help="print all fields as JSON.")
    if name not in ("list", "ps", "prune", "search"):
        parser.add_argument("name", metavar="MODEL")
    if name == "convert":
        add_quant(parser, "4bit")
    if name in ("get", "convert"):
        add_as_for_serve(parser, "revision")
    if name == "get":
        parser.add_argument("--json", action="store_true", help="print progress as lines of JSON, as Ollama's /api/pull does.")
    if name == "prune":
        parser.add_argument(
            "--unused-days", type=float, default=30.0, metavar="DAYS", help="only entries unused for DAYS (default 30; 0: all)."
        )
        parser.add_argument("--dry-run", action="store_true", help="list what would be deleted.")
    parser.set_defaults(action=name)


def add_replica(replica: Parser) -> None:
    """Add the actions of `tandem replica`."""
    actions = add_actions(
        replica,
        {
            "list": "List the replicas: state, process, requests, ranks.",
            "add": "Start one more replica with the server's settings; it joins when it is ready.",
            "drain": "Send a replica nothing new, and end it when it has nothing left to do.",
        },
    )
    actions["add"].add_argument(
        "--role",
        choices=get_args(Role),
        default="both",
        help="what it is for: long prompts (prefill), answers (decode), or both [both]",
    )
    actions["drain"].add_argument("replica", type=int, metavar="N", help="number that `tandem replica list` shows.")
    for parser in actions.values():
        add_server(parser)


def add_cache(cache: Parser) -> None:
    """Add the actions of `tandem cache`."""
    actions = add_actions(
        cache,
        {
            "list": "List the prefixes in memory, and how much of each is on disk; or what is in a directory.",
            "info": "Say how much is kept, where, and how often it served.",
            "warm": "Compute a prompt before users come, at every replica: a system prompt, a repository's context, a chat.",
            "drop": "Let go of what is kept, in memory and on disk.",
        },
    )
    warm, drop = actions["warm"], actions["drop"]
    warm.add_argument(
        "file",
        metavar="FILE",
        help="a text; or .json with a chat request or its messages; or .jsonl "
        "with one of these, or a message, on each line; - is a text from standard input.",
    )
    warm.add_argument(
        "--role",
        choices=("system", "user", "none"),
        default="system",
        help="what a text is: the system "
        "message, the beginning of the first user's message, or, with none, of prompts to "
        "/v1/completions [system]",
    )
    drop.add_argument(
        "--tier", choices=("memory", "all"), default="all", help="memory: what is on disk stays there, and is read again [all]"
    )
    drop.add_argument("--unused-days", type=float, metavar="DAYS", help="with --kv-disk: only blocks unused for DAYS.")
    for parser in actions.values():
        if parser is not warm:
            parser.add_argument(
                "--kv-disk", metavar="DIR", help="this directory, of all servers that use it, in place of a server."
            )
        parser.add_argument("--model", metavar="NAME", help="of a server with several: this one.")
        add_server(parser)


def add_completions(parser: Parser) -> None:
    """Add the argument of `tandem completions`."""
    parser.add_argument(
        "shell",
        choices=("bash", "zsh", "fish"),
        help='bash and zsh: eval "$(tandem completions bash)" in ~/.bashrc or ~/.zshrc; fish: tandem completions fish | source.',
    )


def add_service(service: Parser) -> None:
    """Add the actions of `tandem service`."""
    actions = add_actions(
        service,
        {
            "install": "Install it with the options of `tandem serve`, and start it.",
            "uninstall": "Stop it, and take it away.",
            "status": "Say whether it is installed and runs; exit code 0 if it does.",
        },
    )
    add_settings(actions["install"], SERVE_SECTIONS)
    actions["install"].add_argument(
        "--system",
        action="store_true",
        help="macOS: start it with the machine, without a login; writes the file and prints the two commands for sudo.",
    )
    for parser in actions.values():
        parser.add_argument("--name", default="default", help="of the service, where there are several [default]")


def add_quant(parser: Parser, default: str | None = None) -> None:
    """Add the option for weights of fewer bits."""
    text = "format of the weights: the model's copy on the hub, else a conversion that is made once, in the cache"
    action = parser.add_argument("--quant", choices=FORMATS, default=default, help=f"{text} [{default or 'as stored'}]")
    if default is None:  # one of many options
        parser.seldom.add(action)


def add_serve(serve: Parser) -> None:
    """Add the options of `tandem serve`."""
    add_settings(serve, SERVE_SECTIONS)
    add_quant(serve)


def add_up(up: Parser) -> None:
    """Add the options of `tandem up`."""
    add_serve(up)
    up.add_argument("--no-wait", action="store_true", help="do not wait.")
    up.add_argument("--replace", action="store_true", help="first end the server of that name that runs, once it has finished.")
    up.set_defaults(now=False, sync=False)
    up.add_argument("--name", help=_NAME)


def add_down(down: Parser) -> None:
    """Add the options of `tandem down`."""
    down.add_argument("--now", action="store_true", help="drop requests that are under way.")
    _add_name(down)


def add_restart(restart: Parser) -> None:
    """Add the options of `tandem restart`."""
    how = restart.add_mutually_exclusive_group()
    how.add_argument("--now", action="store_true", help="drop requests that are under way.")
    how.add_argument(
        "--rolling",
        action="store_true",
        help="replace the api, then the replicas one at a time, while the server goes on: no request is lost.",
    )
    restart.add_argument("--sync", action="store_true", help="first install this Tandem on the hosts file's machines.")
    restart.add_argument("--no-wait", action="store_true", help="do not wait until it is ready.")
    _add_name(restart)


def add_update(update: Parser) -> None:
    """Add the options of `tandem update`."""
    update.add_argument("--check", action="store_true", help="only look: change nothing.")
    update.add_argument("--restart", action="store_true", help="then `tandem restart --rolling --sync`, where code is older.")


def add_status(status: Parser) -> None:
    """Add the options of `tandem status`."""
    status.add_argument("--url", metavar="URL", help="the server of this machine with this address, however started.")
    status.add_argument("--port", type=int, metavar="N", help="the server on this port, however started.")
    status.add_argument(
        "--interval",
        type=_seconds,
        default=1.0,
        metavar="S",
        help="seconds over which tokens are counted, at least 0.6; 0 leaves them out [1]",
    )
    status.add_argument("--json", action="store_true", help="print what is known as JSON.")
    status.add_argument("--watch", action="store_true", help="go on showing it until Ctrl-C, on a terminal.")
    _add_name(status, "only this server.")


def add_logs(logs: Parser) -> None:
    """Add the options of `tandem logs`."""
    logs.add_argument("-f", "--follow", action="store_true", help="go on printing until the server ends.")
    logs.add_argument("-n", "--lines", type=_count, default=50, metavar="N", help="lines to begin with [50]")
    _add_name(logs)


def add_support(support: Parser) -> None:
    """Add the options of `tandem support`."""
    support.add_argument("-n", "--lines", type=_count, default=2000, metavar="N", help="of each log, its last [2000]")
    add_hostfile(support, ": the doctor looks at its machines.")
    support.add_argument("--output", metavar="FILE", help="to write; by default tandem-support-DATE.txt here.")
    _add_name(support, "of a server that `tandem up` started; by default all of them.")


_NAME = "of the server, where there are several [default]"


def _add_name(parser: Parser, text: str = _NAME) -> None:
    parser.add_argument("--name", help=text)
    parser.add_argument("server", nargs="?", metavar="NAME", help="of the server, as with --name.")


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
