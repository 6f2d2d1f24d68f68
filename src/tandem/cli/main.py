"""The `tandem` command."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from tandem.cli.arguments import SERVE_SECTIONS, Later, Parser, add_command, add_settings, drop_output, exit_code, fail
from tandem.cli.options import bench, machines, sampling, servers, vllm_mlx
from tandem.crash_guard import own_process
from tandem.descriptors import raise_limit
from tandem.version import __version__

EXIT_UNREAD = 141
"""Exit code of a process ended by SIGPIPE: 128 plus the signal's number."""
EPILOG = """run is another name for chat; pull, search, list, show, rm and ps for model get, search, list ...
To begin with: tandem model get demo; tandem chat demo; tandem serve demo
`tandem COMMAND --help` tells more of a command."""


@dataclass(frozen=True)
class Command:
    """A command of `tandem`."""

    text: str
    """Description of the command; `tandem --help` shows its first sentence."""
    add: Callable[[Parser], None]
    """Function that adds the command's options to its parser."""
    run: Callable[[argparse.Namespace], int]


def _with(*sections: str) -> Callable[[Parser], None]:
    return partial(add_settings, sections=sections)


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.probe:  # runs on another machine, which may lack the report's dependencies
        from tandem.diagnostics.doctor.probe import main as probe

        return probe()
    return Later("doctor:run")(arguments)


def _version(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    print(f"tandem {__version__}")
    for name in ("mlx", "mlx-lm", "pyzmq", "fastapi"):
        print(f"{name} {version(name)}")
    return 0


CHAT = Command(
    "Talk in this terminal to a running server, or to a model loaded here.", sampling.add_chat, Later("talk.talk:run_chat")
)
SELFTEST = "Run checks of hardware and libraries on this machine, and write a report of one page."
COMMANDS = {
    "a model": {
        "serve": Command("Load a model and serve it over HTTP.", servers.add_serve, Later("serve:run")),
        "chat": CHAT,
        "generate": Command(
            "Complete a prompt in this terminal, by a running server or a model loaded here.",
            sampling.add_generate,
            Later("talk.talk:run_generate"),
        ),
        "model": Command(
            "Fetch models, see and remove those on this machine; load and unload those of a server.",
            servers.add_model,
            Later("model:run"),
        ),
    },
    "a server in the background": {
        "up": Command("Start a server in the background, and wait until it is ready.", servers.add_up, Later("lifecycle:run_up")),
        "status": Command(
            "Show running servers: ranks, hosts, memory, tokens/s, restarts.", servers.add_status, Later("status:run")
        ),
        "logs": Command("Print the log of a server that `tandem up` started.", servers.add_logs, Later("lifecycle:run_logs")),
        "restart": Command(
            "Restart a server that `tandem up` started, with its options read anew.",
            servers.add_restart,
            Later("lifecycle:run_restart"),
        ),
        "down": Command("End a server that `tandem up` started.", servers.add_down, Later("lifecycle:run_down")),
        "update": Command("Update a checkout, and servers of older code.", servers.add_update, Later("hosts.update:run")),
        "service": Command(
            "Have the system keep a server running: by launchd on macOS, by systemd on Linux.",
            servers.add_service,
            Later("service:run"),
        ),
    },
    "several machines": {
        "plan": Command(
            "Compare the ways to spread a model over machines, before anything is loaded.", machines.add_plan, Later("plan:run")
        ),
        "hosts": Command(
            "Find machines, pair with them, write the hosts file, and install Tandem on them.",
            machines.add_hosts,
            Later("hosts.command:run"),
        ),
        "agent": Command(
            "Let machines that this one is paired with run their parts of a model here, until Ctrl-C.",
            machines.add_agent,
            Later("agent:run"),
        ),
        "rank": Command(
            "Run a rank on this machine for a `tandem serve --launcher manual` elsewhere; also under "
            "mlx.launch. Order does not matter: it waits for the head, and the head for it.",
            machines.add_rank,
            Later("rank:run"),
        ),
        "doctor": Command(
            "Check the machines and links of a cluster, and print how to mend what is wrong.", machines.add_doctor, _doctor
        ),
        "support": Command(
            "Write one file for a bug report: versions, settings, logs and findings, no keys, no prompts.",
            servers.add_support,
            Later("support:run"),
        ),
        "selftest": Command(SELFTEST, machines.add_selftest, Later("selftest:run")),
        "parity": Command(
            "Compare a layout's logits and greedy tokens with those of a single process.",
            machines.add_parity,
            Later("parity:run"),
        ),
    },
    "a running server": {
        "top": Command(
            "Watch a running server: replicas, ranks, memory, tokens/s, first token, queue, restarts.",
            bench.add_top,
            Later("bench.top:run"),
        ),
        "replica": Command(
            "See, add and drain the replicas of a running `tandem serve`.", servers.add_replica, Later("lifecycle:run_replica")
        ),
        "cache": Command(
            "See, warm and drop the prefixes that a running server keeps, in memory and on disk.",
            servers.add_cache,
            Later("cache.command:run"),
        ),
        "batch": Command(
            "Send a file of requests, in OpenAI's batch format, to a running server.", bench.add_batch, Later("batch:run")
        ),
        "bench": Command("Measure a server, or what joins the ranks of this machine.", bench.add_bench, Later("bench.load:run")),
    },
    "parts of a server, and of this command": {
        "api": Command(
            "Serve HTTP for an engine that runs by itself; it can be restarted at any time.",
            _with("model", "server", "process"),
            Later("processes:run_api_command"),
        ),
        "engine": Command(
            "Load a model and wait for `tandem api` on a Unix socket.",
            _with(*SERVE_SECTIONS[:-1]),
            Later("processes:run_engine_command"),
        ),
        "completions": Command(
            "Print a script that completes this command's words in a shell.",
            servers.add_completions,
            Later("shell_completions:run"),
        ),
        "version": Command("Print the versions of Tandem and of what it stands on.", lambda parser: None, _version),
    },
}
"""Commands by name, under the headings of `tandem --help`."""
OTHER_NAMES = {
    "run": CHAT,
    "firstlight": Command(SELFTEST, partial(machines.add_selftest, report="firstlight.md"), Later("selftest:run")),
    **{
        name: Command(servers.MODEL_ACTIONS[action], partial(servers.add_model_action, name=action), Later("model:run"))
        for name, action in servers.SHORT.items()
    },
    "distributed_launcher": Command(
        "As `python -m vllm_mlx.distributed_launcher`: tensor parallelism over the hosts of a hostfile.",
        vllm_mlx.add_launcher,
        Later("serve:run_launcher"),
    ),
}
"""Aliases and other commands that `--help` does not list."""


def build_parser() -> Parser:
    """Return the parser of all commands. Each sets `run`, a lazily imported function."""
    parser = Parser(
        prog="tandem",
        description="Serve one large language model over several machines.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parser.groups = COMMANDS
    for named in (*COMMANDS.values(), OTHER_NAMES):
        for name, command in named.items():
            own = add_command(commands, name, command.text, hidden=named is OTHER_NAMES)
            command.add(own)
            own.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 2 for a user's mistake, 3 for an engine failure.

    If the reader of standard output has closed it (`| head`), end silently with `EXIT_UNREAD`.
    """
    _open_streams()
    try:
        try:
            return _command(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        if not _nobody_reads():
            return fail(str(error))
        drop_output()
        return EXIT_UNREAD
    except OSError as error:  # `_command` handles all other OSErrors
        drop_output()
        return fail(f"standard output cannot be written: {error.strerror}")


def _open_streams() -> None:
    """Open closed standard streams (`>&-`) on /dev/null; otherwise the next file or socket would get their descriptors.

    Input in any encoding can be read.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # whoever takes text refuses what is not UTF-8


def _nobody_reads() -> bool:
    """Return True if the reader of standard output has closed it; False if another pipe broke."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return bool(output.poll(0))


def _command(argv: Sequence[str] | None) -> int:
    if argv is None:  # this process runs only the command; no other program calls `main`
        own_process()
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    for name in ("model_argument", "model", "name"):
        if getattr(arguments, name, None) == "demo:latest":  # Ollama's tag; the catalogue takes it for its names
            setattr(arguments, name, "demo")
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    raise_limit()
    return exit_code(partial(arguments.run, arguments))


if __name__ == "__main__":
    sys.exit(main())
