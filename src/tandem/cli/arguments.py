"""Parsers of the command line. Most options are generated from the settings' dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import logging
import os
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tandem.config.foreign import remedy
from tandem.config.legacy import hub_cache, read_dotenv
from tandem.config.loading import PROFILES, LoadedSettings, load
from tandem.config.options import ALIASES, RENAMED, Option, by_name, field_docs, nearest, options, section_class
from tandem.env import set_variables, variable, variables
from tandem.errors import RankFailure, RequestError, TandemError, UsageError
from tandem.printable import printable

log = logging.getLogger("tandem.cli")
T = TypeVar("T")

TITLES = {
    "model": "model",
    "parallel": "layout",
    "scheduler": "scheduling and memory",
    "speculation": "speculative decoding",
    "server": "server",
    "process": "processes and logs",
    "models": "several models",
}
_PREFIX = "setting_"
METAVARS = {int: "N", float: "X"}
DEFAULT_URL = "http://127.0.0.1:8000"
BACKENDS = ("ring", "jaccl", "jaccl-ring", "nccl")
"""MLX backends that commands other than `tandem serve` accept."""
_Options = argparse.ArgumentParser | argparse._ArgumentGroup


def _nearest(flag: str, known: Collection[str]) -> str | None:
    """Return the known flag most similar to `flag`, or to whose first words it is similar; None if there is none."""
    meant = {name: name for name in known}
    for name in list(meant):
        meant.setdefault("-".join(name.split("-")[: flag.count("-") + 1]), name)
    near = difflib.get_close_matches(flag, known, 1, 0.8) or difflib.get_close_matches(flag, meant, 1, 0.7)
    return meant[near[0]] if near else None


class Parser(argparse.ArgumentParser):
    """Parser of a command. Wrong arguments exit with code 2 and one line, which suggests a similar word.

    `--help` shows the common options, `--help-all` all of them.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seldom: set[argparse.Action] = set()
        """Options that only `--help-all` shows."""
        self.translate: Callable[[Sequence[str]], list[str]] | None = None
        """Translation of the arguments of another system's command; None for none."""
        self.groups: Mapping[str, Collection[str]] = {}
        """Headings of `--help`, with the names of the commands below each."""

    def error(self, message: str) -> NoReturn:
        """Print the message on one line and exit with code 2."""
        if message.endswith("arguments are required: ACTION"):
            self.exit(2, f"{self.format_help()}\n{self.prog}: name an action\n")
        every = "--help-all" if self.seldom else "--help"
        self.exit(2, f"{self.prog}: {message}; `{self.prog} {every}` lists all\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse like argparse, but let the subcommand that received unknown arguments report them."""
        if self.translate is not None:
            args = self.translate(args)
        namespace, unknown = super().parse_known_args(args, namespace)
        behind = any(action.dest == "prompt" for action in self._get_positional_actions())
        if unknown and not any(word.startswith("-") for word in unknown) and (behind or getattr(namespace, "prompt", "") is None):
            # argparse takes no optional argument that comes after options, and of several words the first
            namespace.prompt, unknown = " ".join([*filter(None, [namespace.prompt]), *unknown]), []
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            told = "".join(remedy(flag, self._option_string_actions) for flag in dict.fromkeys(flags) if self.seldom)
            if flags and not told and (near := _nearest(flags[0], self._option_string_actions)):
                told = f"; did you mean {near}?"
            self.error(f"unrecognized arguments: {' '.join(flags or unknown)}{told}")
        return namespace, unknown

    def _check_value(self, action: argparse.Action, value: object) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            meant = (action.dest == "command" and remedy(str(value))) or nearest(str(value), action.choices)
            raise argparse.ArgumentError(None, f"there is no {str(action.metavar).lower()} {value!r}{meant}")
        super()._check_value(action, value)

    def format_help(self) -> str:
        """Return the short help: common options, each with its first sentence."""
        if self.groups:
            return self._format_groups()
        if not self.seldom:
            return super().format_help()
        texts, usage = {action: action.help for action in self._actions}, self.usage
        self.usage = "%(prog)s [options] [MODEL]"
        for action, text in texts.items():
            action.help = argparse.SUPPRESS if action in self.seldom else first_sentence(text)
        try:
            return f"{super().format_help()}\n{len(self.seldom)} more options: {self.prog} --help-all\n"
        finally:
            self.usage = usage
            for action, text in texts.items():
                action.help = text

    def _format_groups(self) -> str:
        """Return the commands under their headings, one per line."""
        (commands,) = [action for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        texts = {command.dest: command.help for command in commands._choices_actions}
        parts = [self.format_usage().rstrip(), self.description or ""]
        for title, names in self.groups.items():
            lines = [f"  {name:13}{first_sentence(texts[name])}" for name in names]
            parts.append("\n".join([f"{title}:", *lines]))
        return "\n\n".join([*parts, self.epilog or ""]) + "\n"

    def format_help_all(self) -> str:
        """Return the help with all options."""
        return super().format_help()


def first_sentence(text: str | None) -> str | None:
    """Return the first sentence of a help text, with the default in brackets; None and SUPPRESS stay."""
    if text is None or text == argparse.SUPPRESS:
        return text
    default = re.search(r" \[[^\]]*\]$", text)
    first = re.split(r"(?<=\w[.;]) ", text.removesuffix(default[0]) if default else text)[0].rstrip(".;")
    return first + (default[0] if default else "")


def filled(text: str) -> str:
    """Return `text` unchanged. Raises ArgumentTypeError if it is empty, as for `"$FILE"` with an unset variable."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


def filled_in(kind: type[T], arguments: argparse.Namespace, **others: object) -> T:
    """Return a dataclass with the arguments that have the names of its fields; `others` are fields of other values."""
    names = [field.name for field in dataclasses.fields(kind) if field.name not in others]  # type: ignore[arg-type]
    return kind(**{name: getattr(arguments, name) for name in names}, **others)


class _HelpAll(argparse.Action):
    """Action that prints the help with all options and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: object) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="show all options, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


_HELP = partial(argparse.HelpFormatter, max_help_position=34, width=110)


def add_command(commands: argparse._SubParsersAction[Parser], name: str, text: str, *, hidden: bool = False) -> Parser:
    """Add and return a command's parser. `hidden` omits it from `--help`."""
    listed: dict[str, Any] = {} if hidden else {"help": text}
    parser: Parser = commands.add_parser(name, description=text, formatter_class=_HELP, allow_abbrev=False, **listed)
    return parser


def add_actions(parser: Parser, texts: Mapping[str, str]) -> dict[str, Parser]:
    """Add and return parsers for a command's actions. `texts` maps names to descriptions. `action` stores the chosen name."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    return {name: add_command(actions, name, text) for name, text in texts.items()}


@dataclass(frozen=True)
class Later:
    """Lazily imported command, so that `tandem --help` and completions import no command's module."""

    place: str
    """Module below `tandem.cli` and function in it: `module:function`."""

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run the command. Raises UsageError if it needs an optional package that is not installed."""
        try:
            run: Callable[[argparse.Namespace], int] = pkgutil.resolve_name(f"tandem.cli.{self.place}")
        except ModuleNotFoundError as error:
            if error.name not in ("zeroconf", "spake2"):
                raise
            raise UsageError(
                f"`tandem {arguments.command}` needs the package {error.name}: pip install "
                "'mlx-tandem[agent]', or '.[agent]' in a checkout"
            ) from None
        return run(arguments)


SERVE_SECTIONS = ("model", "parallel", "scheduler", "speculation", "server", "process", "models")
"""Sections of the settings for `tandem serve` and other commands that start a server."""
OFTEN = frozenset(
    {
        "served_name",
        "max_context",
        "generation_config",
        "adapter_path",
        "pipeline_parallel_size",
        "tensor_parallel_size",
        "data_parallel_size",
        "layer_split",
        "hostfile",
        "max_batch_size",
        "kv_tokens",
        "memory_fraction",
        "max_memory",
        "draft_model",
        "host",
        "port",
        "api_key_file",
        "default_max_tokens",
        "journal",
        "log_level",
        "extra_models",
        "lora_modules",
        "unload_after",
    }
)
"""Names of the settings that `--help` shows."""


def add_settings(parser: Parser, sections: Sequence[str]) -> None:
    """Add the options of these settings sections, and the model as a positional argument."""
    parser.add_argument("--help-all", action=_HelpAll)
    text = field_docs(section_class("model"))["model"]
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=text)
    general = parser.add_argument_group("configuration")
    general.add_argument(
        "--config",
        metavar="FILE",
        help="TOML file with tables [model] [parallel] [scheduler] "
        "[speculation] [server] [process] [models]. Options win over TANDEM_* variables, these over it.",
    )
    general.add_argument(
        "--profile",
        choices=PROFILES,
        help="also read the environment variables of another system. (Measured speeds: --hardware-profile.)",
    )
    for section in sections:
        group = parser.add_argument_group(TITLES[section])
        for option in options():
            if option.section == section:
                action = _add(group, option)
                if option.name not in OFTEN:
                    parser.seldom.add(action)


def _add(group: argparse._ArgumentGroup, option: Option) -> argparse.Action:
    for former in _former(option):
        _add_flags(group, former, argparse.SUPPRESS)
    return _add_flags(group, option, option.help.replace("%", "%%") + _default(option))


def _former(option: Option) -> list[Option]:
    return [dataclasses.replace(option, name=name) for name, present in RENAMED.items() if present == option.name]


def _add_flags(group: argparse._ArgumentGroup, option: Option, text: str) -> argparse.Action:
    flags = [option.flag, *ALIASES.get(option.name, ())]
    target = _PREFIX + option.name
    if option.base is bool:
        text += f" {_off(flags)[0]} turns it off." if option.default and text != argparse.SUPPRESS else ""
        action: argparse.Action = group.add_argument(*flags, dest=target, action="append_const", const="true", help=text)
        group.add_argument(*_off(flags), dest=target, action="append_const", const="false", help=argparse.SUPPRESS)
        return action
    metavar = METAVARS.get(option.base, "TEXT")
    if option.choices:
        metavar = "{" + ",".join(option.choices) + "}"
    kind, nargs = ("extend", "+") if option.name == "served_name" else ("append", None)  # the first as vLLM has it
    return group.add_argument(*flags, dest=target, action=kind, nargs=nargs, metavar=metavar, help=text)


def add_as_for_serve(parser: _Options, *names: str) -> None:
    """Add a few settings' options to another command, with the same help, values and defaults."""
    for name in names:
        option = by_name()[name]
        parser.add_argument(
            option.flag,
            type=option.base,
            choices=option.choices or None,
            default=option.default,
            metavar=None if option.choices else METAVARS.get(option.base, "TEXT"),
            help=option.help.replace("%", "%%") + _default(option),
        )
        for former in _former(option):
            parser.add_argument(former.flag, dest=name, type=option.base, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def add_hostfile(parser: argparse._ActionsContainer, text: str, flag: str = "--hostfile") -> None:
    """Add an option for a hosts file; `text` says what it is for."""
    parser.add_argument(flag, metavar="FILE", type=filled, help=f"MLX's JSON hosts file{text}")


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a running server."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--url",
        "--base-url",
        metavar="URL",
        help=f"the server; else --port, --name, TANDEM_BASE_URL, the one that `tandem up` started, else {DEFAULT_URL}.",
    )
    group.add_argument("--port", dest="server_port", type=int, metavar="N", help="the server on this port of this machine.")
    group.add_argument("--name", dest="server_name", metavar="NAME", help="the server that `tandem up --name` started.")
    group.add_argument(
        "--api-key-file", metavar="FILE", help="file with the API key; else TANDEM_API_KEY or OPENAI_API_KEY is used."
    )


def _off(flags: Sequence[str]) -> list[str]:
    return ["--no-" + flag.removeprefix("--") for flag in flags]


def _default(option: Option) -> str:
    if option.default is None or option.default in ("", ()):
        return ""
    value = str(option.default).lower() if option.base is bool else option.default
    return f" [{value}]"


def load_settings(arguments: argparse.Namespace) -> LoadedSettings:
    """Return settings merged from arguments, environment and configuration file. Raises UsageError."""
    flags: dict[str, list[str]] = {}
    for key, value in vars(arguments).items():
        if key.startswith(_PREFIX) and value is not None:
            flags[key.removeprefix(_PREFIX)] = value if isinstance(value, list) else [value]
    positional = getattr(arguments, "model_argument", None)
    if positional is not None:
        if flags.get("model", [positional])[-1] != positional:
            raise UsageError(f"MODEL {positional} and --model {flags['model'][-1]} differ; give one", param="model")
        flags["model"] = [positional]
    if (arguments.profile or variable("TANDEM_PROFILE")) == "ring":
        # Set in this process, so that libraries here and in children also read them (HF_TOKEN, HF_HUB_CACHE).
        set_variables(read_dotenv(Path.cwd(), variables()))
        set_variables(hub_cache(variables()))
    return load(flags, environment=variables(), config_file=arguments.config, profile=arguments.profile)


def fail(message: str) -> int:
    """Print one line on stderr; return 2, the exit code of a user's mistake."""
    with suppress(OSError):  # the exit code tells too
        print(f"tandem: {printable(message)}", file=sys.stderr)
    return 2


def exit_code(run: Callable[[], int]) -> int:
    """Call `run` and return its exit code; report an error in one line. Raises BrokenPipeError.

    Codes: 2 for a user's mistake, 3 for an engine failure, 1 for other Tandem errors, 130 for Ctrl-C.
    """
    try:
        return run()
    except (UsageError, RequestError) as error:
        return fail(error.message)
    except RankFailure as error:
        logging.getLogger("tandem").debug("%s", error.details)
        fail(error.message)
        return 3
    except TandemError as error:
        fail(error.message)
        return 1
    except BrokenPipeError:
        raise
    except OSError as error:
        logging.getLogger("tandem").debug("%s", error, exc_info=True)
        return fail(str(error))
    except RuntimeError as error:
        return fail(unknown_home(error))
    except KeyboardInterrupt:
        return 130


def unknown_home(error: RuntimeError) -> str:
    """Return the message for pathlib's error about the home directory of ~ or ~NAME; raise any other error again."""
    if "home directory" not in str(error):
        raise error
    return "a path begins with the home directory of a user whom the system does not know: write it out, or set HOME"


def say(text: str) -> None:
    """Print a line for people. If standard output is full or closed, log a warning and drop all further output."""
    try:
        print(f"\r{text}" if sys.stdout.isatty() else text, flush=True)  # over a terminal's ^C
    except OSError as error:
        log.warning("Standard output cannot be written, continuing without it: %s", error.strerror)
        drop_output()


def drop_output() -> None:
    """Redirect standard output to /dev/null; its buffer is lost."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
