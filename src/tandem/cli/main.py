"""The `tandem` command."""

from __future__ import annotations

import argparse
import logging
import os
import pkgutil
import select
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

from tandem.borders import own_process
from tandem.cli.arguments import Parser, add_command, add_settings, drop_output, fail
from tandem.cli.options import bench, machines, plan, sampling, servers, vllm_mlx
from tandem.config.settings import Role
from tandem.descriptors import raise_limit
from tandem.errors import RankFailure, RequestError, TandemError, UsageError
from tandem.version import __version__

SERVE_SECTIONS = ("model", "parallel", "scheduler", "speculation", "server", "process", "models")
ENGINE_SECTIONS = SERVE_SECTIONS[:-1]
EXIT_FAILED = 3
EXIT_UNREAD = 141
"""128 and the number of SIGPIPE."""
EPILOG = """run, pull, list, show, rm and ps are other names for chat and for model get, list, show, rm and ps.
To begin with: tandem model get demo; tandem chat demo; tandem serve demo
`tandem COMMAND --help` tells more of a command."""
GROUPS = {
    "a model": ("serve", "chat", "generate", "model"),
    "a server in the background": ("up", "status", "logs", "restart", "down", "service"),
    "several machines": ("plan", "hosts", "agent", "rank", "doctor", "firstlight", "parity"),
    "a running server": ("top", "replica", "cache", "batch", "bench"),
    "parts of a server, and of this command": ("api", "engine", "completions", "version"),
}
Run = Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Later:
    """A command that is imported when it runs."""

    place: str
    """Its module below `tandem.cli`, and its function in it."""

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run it."""
        run: Run = pkgutil.resolve_name(f"tandem.cli.{self.place}")
        return run(arguments)


def build_parser() -> Parser:
    """The parser of all commands; each sets `run`, a function that is imported when it is called."""
    parser = Parser(prog="tandem", description="Serve one large language model over several machines.")
    parser.add_argument("--version", action="version", version=f"tandem {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    parser.epilog, parser.groups = EPILOG, GROUPS
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    serve = add_command(commands, "serve", "Load a model and serve it over HTTP.")
    add_settings(serve, SERVE_SECTIONS)
    serve.set_defaults(run=Later("serve:run"))
    api = add_command(commands, "api", "Serve HTTP for an engine that runs by itself; it can be restarted at any time.")
    add_settings(api, ("model", "server", "process"))
    api.set_defaults(run=Later("processes:run_api_command"))
    engine = add_command(commands, "engine", "Load a model and wait for `tandem api` on a Unix socket.")
    add_settings(engine, ENGINE_SECTIONS)
    engine.set_defaults(run=Later("processes:run_engine_command"))
    vllm_mlx.add_parser(commands, SERVE_SECTIONS, Later("serve:run_launcher"))
    servers.add_lifecycle(commands, SERVE_SECTIONS, _lifecycle)
    _add_rank(commands)
    machines.add_agent(commands, _discovery)
    _add_generate(commands)
    _add_model(commands)
    _add_replica(commands)
    servers.add_cache(commands).set_defaults(run=Later("cache.command:run"))
    plan.add_parser(commands).set_defaults(run=Later("plan.command:run"))
    machines.add_parity(commands).set_defaults(run=Later("parity:run"))
    machines.add_doctor(commands).set_defaults(run=_doctor)
    machines.add_firstlight(commands).set_defaults(run=Later("firstlight.command:run"))
    bench.add_parser(commands).set_defaults(run=Later("bench:run"))
    bench.add_top(commands).set_defaults(run=Later("top:run"))
    bench.add_batch(commands).set_defaults(run=Later("batch:run"))
    servers.add_service(commands, SERVE_SECTIONS, Later("service.command:run"))
    servers.add_completions(commands, _completions)
    version = add_command(commands, "version", "Print the versions of Tandem and of what it stands on.")
    version.set_defaults(run=_version)
    return parser


def _add_rank(commands: argparse._SubParsersAction[Parser]) -> None:
    rank = add_command(commands, "rank", "Run a rank on this machine for a `tandem serve --launcher manual` elsewhere; "
                       "also under mlx.launch. Order does not matter: it waits for the head, and the head for it.")
    rank.add_argument("--join", metavar="HOST[:PORT]", help="the head's machine, and its --join-port [29650]")
    rank.add_argument("--token-file", metavar="FILE", help="a copy of the head's token file, mode 600.")
    rank.add_argument("--rank", type=int, metavar="N", help="which rank; by default MLX_RANK, else as they join.")
    rank.add_argument("--address", metavar="IP", help="address of this machine for other ranks; by default that from "
                      "which it reaches the head.")
    rank.add_argument("--join-timeout", type=float, default=300.0, metavar="X",
                      help="seconds to keep trying to reach the head, at first and when it was lost [300]")
    rank.add_argument("--log-level", choices=("DEBUG", "INFO", "WARNING", "ERROR"), default="INFO",
                      help="least severe messages to log [INFO]")
    rank.add_argument("--stdin", action="store_true", help=argparse.SUPPRESS)
    rank.set_defaults(run=Later("rank:run"))


def _add_generate(commands: argparse._SubParsersAction[Parser]) -> None:
    chat = "Talk in this terminal to a running server, or to a model loaded here."
    for name, text in (("generate", "Complete a prompt in this terminal, by a running server or a model loaded here."),
                       ("chat", chat), ("run", chat)):
        parser = add_command(commands, name, text, hidden=name == "run")
        group = parser.add_argument_group("conversation" if name != "generate" else "prompt")
        if name == "generate":
            group.add_argument("--prompt", "-p", help="the text to complete; by default standard input.")
        else:
            group.add_argument("--system", help="a system message to begin with.")
        group.add_argument("--local", action="store_true", help="load the model here, also if a server has it.")
        sampling.add_sampling(parser, sampling.DEFAULTS if name == "generate" else sampling.CHAT_DEFAULTS)
        bench.add_server(parser)
        add_settings(parser, ("model", "parallel", "scheduler", "speculation"))
        parser.set_defaults(run=Later(f"talk.command:run_{'generate' if name == 'generate' else 'chat'}"))


MODEL_ACTIONS = {
    "get": "Download a model: `demo`, or a hub id (org/name).",
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
SHORT = {"pull": "get", "list": "list", "show": "show", "rm": "rm", "ps": "ps"}
"""Commands that are actions of `tandem model`, as Ollama's users know them."""


def _add_model(commands: argparse._SubParsersAction[Parser]) -> None:
    model = add_command(commands, "model", "Fetch models, see and remove those on this machine; load and unload those "
                        "of a server.")
    actions = model.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    for name, text in MODEL_ACTIONS.items():
        _add_model_action(add_command(actions, name, text), name)
    for name, action in SHORT.items():
        parser = add_command(commands, name, MODEL_ACTIONS[action], hidden=True)
        _add_model_action(parser, action)
        parser.set_defaults(run=Later("model:run"), action=action)
    model.set_defaults(run=Later("model:run"))


def _add_model_action(parser: Parser, name: str) -> None:
    if name in ("ps", "load", "unload"):
        bench.add_server(parser)
    if name not in ("list", "ps", "prune"):
        parser.add_argument("name", metavar="MODEL")
    if name == "get":
        parser.add_argument("--revision", help="branch, tag or commit of a hub model.")
    if name == "prune":
        parser.add_argument("--unused-days", type=float, default=30.0, metavar="DAYS",
                            help="how long nobody has needed it (default 30; 0: all).")
        parser.add_argument("--dry-run", action="store_true", help="only say what would go.")


def _add_replica(commands: argparse._SubParsersAction[Parser]) -> None:
    replica = add_command(commands, "replica", "See, add and drain the replicas of a running `tandem serve`.")
    actions = replica.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    for name, text in (("list", "List the replicas: state, process, requests, ranks."),
                       ("add", "Start one more replica with the server's settings; it joins when it is ready."),
                       ("drain", "Send a replica nothing new, and end it when it has nothing left to do.")):
        parser = add_command(actions, name, text)
        if name == "add":
            parser.add_argument("--role", choices=get_args(Role), default="both", help="what it is for: long prompts "
                                "(prefill), answers (decode), or both [both]")
        if name == "drain":
            parser.add_argument("replica", type=int, metavar="N", help="number that `tandem replica list` shows.")
        bench.add_server(parser)
    replica.set_defaults(run=Later("replica:run"))


def _lifecycle(arguments: argparse.Namespace) -> int:
    from tandem.cli import lifecycle, status

    runs = {"up": lifecycle.run_up, "down": lifecycle.run_down, "restart": lifecycle.run_restart,
            "logs": lifecycle.run_logs, "status": status.run}
    return runs[arguments.command](arguments)


def _discovery(arguments: argparse.Namespace) -> int:
    if arguments.command == "hosts" and arguments.action == "sync":
        from tandem.cli.hosts import sync

        return sync.run(arguments)
    try:
        from tandem.cli import agent
        from tandem.cli.hosts import command as hosts
    except ModuleNotFoundError as error:
        if error.name not in ("zeroconf", "spake2"):
            raise
        return fail(f"`tandem {arguments.command}` needs the package {error.name}: pip install 'mlx-tandem[agent]', "
                    "or '.[agent]' in a checkout")
    return agent.run(arguments) if arguments.command == "agent" else hosts.run(arguments)


def _completions(arguments: argparse.Namespace) -> int:
    from tandem.cli.completions import script

    print(script(arguments.shell, build_parser()), end="")
    return 0


def _doctor(arguments: argparse.Namespace) -> int:
    if arguments.probe:
        from tandem.doctor.probe import main as probe

        return probe()
    from tandem.cli.doctor import run

    return run(arguments)


def _version(arguments: argparse.Namespace) -> int:
    from importlib.metadata import version

    print(f"tandem {__version__}")
    for name in ("mlx", "mlx-lm", "pyzmq", "fastapi"):
        print(f"{name} {version(name)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code: 2 for a mistake of the user's, 3 for a failure of the engine.

    Where whoever reads the output has gone (`| head`), it ends without a word, as one that SIGPIPE ends does.
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
    except OSError as error:  # all others end in `_command`
        drop_output()
        return fail(f"standard output cannot be written: {error.strerror}")


def _open_streams() -> None:
    """Have closed standard streams (`>&-`) lead nowhere: the next file or socket would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _nobody_reads() -> bool:
    """True where the reader of standard output has gone; False where another pipe has broken."""
    output = select.poll()
    output.register(sys.stdout, 0)
    return bool(output.poll(0))


def _command(argv: Sequence[str] | None) -> int:
    if argv is None:  # the command itself, not somebody who calls this
        own_process()
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if arguments.command is None:
        parser.print_help()
        return 2
    arguments.words = list(sys.argv[1:] if argv is None else argv)
    raise_limit()
    run: Run = arguments.run
    try:
        return run(arguments)
    except (UsageError, RequestError) as error:
        return fail(error.message)
    except RankFailure as error:
        logging.getLogger("tandem").debug("%s", error.details)
        fail(error.message)
        return EXIT_FAILED
    except TandemError as error:
        fail(error.message)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        logging.getLogger("tandem").debug("%s", error, exc_info=True)
        return fail(str(error))
    except RuntimeError as error:
        if "home directory" not in str(error):  # pathlib's, of ~ and ~NAME
            raise
        return fail("a path begins with the home directory of a user whom the system does not know: write it out, or "
                    "set HOME")
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
