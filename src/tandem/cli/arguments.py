"""The command line's options, generated from the settings' dataclasses and grouped by their sections."""

from __future__ import annotations

import argparse
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
from typing import Any, NoReturn

from tandem.config.legacy import read_dotenv
from tandem.config.loading import PROFILES, LoadedSettings, load
from tandem.config.options import ALIASES, Option, field_docs, nearest, options, section_class
from tandem.env import set_variables, variable, variables
from tandem.errors import RankFailure, RequestError, TandemError, UsageError
from tandem.printable import printable

log = logging.getLogger("tandem.cli")

TITLES = {"model": "model", "parallel": "layout", "scheduler": "scheduling and memory",
          "speculation": "speculative decoding", "server": "server", "process": "processes and logs",
          "models": "several models"}
_PREFIX = "setting_"


def _nearest(flag: str, known: Collection[str]) -> str | None:
    """The flag that may have been meant; `--pipline` is how one with more words begins."""
    meant = {one: one for one in known}
    for one in list(meant):
        meant.setdefault("-".join(one.split("-")[:flag.count("-") + 1]), one)
    near = difflib.get_close_matches(flag, known, 1, 0.8) or difflib.get_close_matches(flag, meant, 1, 0.7)
    return meant[near[0]] if near else None


class Parser(argparse.ArgumentParser):
    """Wrong arguments end with code 2 and one line, which names what may have been meant. `--help` shows what most
    people need, `--help-all` everything."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.seldom: set[argparse.Action] = set()
        """Options that only `--help-all` shows."""
        self.translate: Callable[[Sequence[str]], list[str]] | None = None
        """What makes words of this command of those of another system's."""
        self.groups: Mapping[str, Collection[str]] = {}
        """Names of commands, by the headings that they are listed under."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        if message.endswith("arguments are required: ACTION"):
            self.exit(2, f"{self.format_help()}\n{self.prog}: name an action\n")
        every = "--help-all" if self.seldom else "--help"
        self.exit(2, f"{self.prog}: {message}; `{self.prog} {every}` lists all\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse does, but words that mean nothing are told by the command that they were given to."""
        if self.translate is not None:
            args = self.translate(args)
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = [word.partition("=")[0] for word in unknown if word.startswith("-")]
            near = _nearest(flags[0], self._option_string_actions) if flags else None
            self.error(f"unrecognized arguments: {' '.join(unknown)}{f'; did you mean {near}?' if near else ''}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            meant = nearest(str(value), action.choices)
            raise argparse.ArgumentError(None, f"there is no {str(action.metavar).lower()} {value!r}{meant}")
        super()._check_value(action, value)

    def format_help(self) -> str:
        """What most people need, of each option the first sentence."""
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
        """The commands under their headings, a line for each."""
        (commands,) = [one for one in self._actions if isinstance(one, argparse._SubParsersAction)]
        texts = {one.dest: one.help for one in commands._choices_actions}
        parts = [self.format_usage().rstrip(), self.description or ""]
        for title, names in self.groups.items():
            lines = [f"  {name:13}{first_sentence(texts[name])}" for name in names]
            parts.append("\n".join([f"{title}:", *lines]))
        return "\n\n".join([*parts, self.epilog or ""]) + "\n"

    def format_help_all(self) -> str:
        """Everything."""
        return super().format_help()


def first_sentence(text: str | None) -> str | None:
    """Without what comes after it, but with the default in brackets."""
    if text is None or text == argparse.SUPPRESS:
        return text
    default = re.search(r" \[[^\]]*\]$", text)
    first = re.split(r"(?<=\w[.;]) ", text.removesuffix(default[0]) if default else text)[0].rstrip(".;")
    return first + (default[0] if default else "")


def filled(text: str) -> str:
    """The type of an option that is not to be empty, as `"$FILE"` may be in a shell. Raises ArgumentTypeError."""
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


class _HelpAll(argparse.Action):
    """Prints all options, and ends."""

    def __init__(self, option_strings: Sequence[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help="show all options, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        assert isinstance(parser, Parser)
        print(parser.format_help_all(), end="")
        parser.exit()


_HELP = partial(argparse.HelpFormatter, max_help_position=34, width=110)
"""Wide enough to read."""


def add_command(commands: Any, name: str, text: str, *, hidden: bool = False) -> Parser:
    """A subcommand's parser; a hidden one is another name for one that is listed."""
    listed = {} if hidden else {"help": text}
    parser: Parser = commands.add_parser(name, description=text, formatter_class=_HELP, allow_abbrev=False,
                                         **listed)
    return parser


def add_actions(parser: Parser, texts: Mapping[str, str]) -> dict[str, Parser]:
    """The parsers of a command's actions, with what each does; `action` will be the one that is chosen."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    return {name: add_command(actions, name, text) for name, text in texts.items()}


@dataclass(frozen=True)
class Later:
    """A command that is imported when it runs, so that `tandem --help` need not wait for any."""

    place: str
    """Module below `tandem.cli`, and the function in it that runs the command."""

    def __call__(self, arguments: argparse.Namespace) -> int:
        """Run it. Raises UsageError where it needs a package that is not in the default install."""
        try:
            run: Callable[[argparse.Namespace], int] = pkgutil.resolve_name(f"tandem.cli.{self.place}")
        except ModuleNotFoundError as error:
            if error.name not in ("zeroconf", "spake2"):
                raise
            raise UsageError(f"`tandem {arguments.command}` needs the package {error.name}: pip install "
                             "'mlx-tandem[agent]', or '.[agent]' in a checkout") from None
        return run(arguments)


SERVE_SECTIONS = ("model", "parallel", "scheduler", "speculation", "server", "process", "models")
"""Settings of `tandem serve`, and of others that start a server."""
OFTEN = frozenset({
    "served_name", "max_context", "generation_config", "adapter_path", "pipeline_parallel_size",
    "tensor_parallel_size", "data_parallel_size", "layer_split", "hostfile", "max_batch_size", "kv_tokens",
    "memory_fraction", "draft_model", "host", "port", "api_key_file", "default_max_tokens", "journal", "log_level",
    "also", "lora_modules", "unload_after",
})
"""Settings that `--help` shows; `--help-all` shows the others too."""


def add_settings(parser: Parser, sections: Sequence[str]) -> None:
    """Add the options of `sections`, and the model as a positional argument."""
    parser.add_argument("--help-all", action=_HelpAll)
    text = field_docs(section_class("model"))["model"]
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=text)
    general = parser.add_argument_group("configuration")
    general.add_argument("--config", metavar="FILE", help="TOML file with tables [model] [parallel] [scheduler] "
                         "[speculation] [server] [process] [models]. Options win over TANDEM_* variables, and those "
                         "over the file.")
    general.add_argument("--profile", choices=PROFILES, help="also read the environment variables of another system. "
                         "(Measured speeds: --hardware-profile.)")
    for section in sections:
        group = parser.add_argument_group(TITLES[section])
        for option in options():
            if option.section == section:
                action = _add(group, option)
                if option.name not in OFTEN:
                    parser.seldom.add(action)


def _add(group: Any, option: Option) -> argparse.Action:
    flags = [option.flag, *ALIASES.get(option.name, ())]
    text = option.help.replace("%", "%%") + _default(option)
    target = _PREFIX + option.name
    if option.base is bool:
        text += f" {_off(flags)[0]} turns it off." if option.default else ""
        action: argparse.Action = group.add_argument(*flags, dest=target, action="append_const", const="true",
                                                     help=text)
        group.add_argument(*_off(flags), dest=target, action="append_const", const="false", help=argparse.SUPPRESS)
        return action
    metavar = {int: "N", float: "X"}.get(option.base, "TEXT")
    if option.choices:
        metavar = "{" + ",".join(option.choices) + "}"
    listed: argparse.Action = group.add_argument(*flags, dest=target, action="append", metavar=metavar, help=text)
    return listed


def _off(flags: Sequence[str]) -> list[str]:
    return ["--no-" + flag.removeprefix("--") for flag in flags]


def _default(option: Option) -> str:
    if option.default is None or option.default in ("", ()):
        return ""
    value = str(option.default).lower() if option.base is bool else option.default
    return f" [{value}]"


def load_settings(arguments: argparse.Namespace) -> LoadedSettings:
    """Settings from the parsed arguments, the environment and the configuration file. Raises ConfigError."""
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
        # Of the process, so that what a library reads (HF_TOKEN, HF_HUB_CACHE) counts too, here and in children.
        set_variables(read_dotenv(Path.cwd(), variables()))
    return load(flags, environment=variables(), config_file=arguments.config, profile=arguments.profile)


def fail(message: str) -> int:
    """Print one line on stderr; return the exit code for a mistake of the user's."""
    with suppress(OSError):  # the exit code says it too
        print(f"tandem: {printable(message)}", file=sys.stderr)
    return 2


def exit_code(run: Callable[[], int]) -> int:
    """Run, and say what went wrong in one line. Returns 2 for a mistake of the user's, 3 for a failure of the engine,
    130 for Ctrl-C. Raises BrokenPipeError."""
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
        if "home directory" not in str(error):  # pathlib's, of ~ and ~NAME
            raise
        return fail("a path begins with the home directory of a user whom the system does not know: write it out, or "
                    "set HOME")
    except KeyboardInterrupt:
        return 130


def say(text: str) -> None:
    """Print what only people need: where standard output is full or closed, the process goes on without it."""
    try:
        print(text, flush=True)
    except OSError as error:
        log.warning("standard output cannot be written (%s); the server runs on without it", error.strerror)
        drop_output()


def drop_output() -> None:
    """Have standard output lead nowhere, also for what its buffer still holds."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
