"""The command line's options, generated from the settings' dataclasses and grouped by their sections."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from tandem.config.loading import PROFILES, LoadedSettings, load
from tandem.config.options import ALIASES, Option, field_docs, options, section_class
from tandem.env import variables
from tandem.errors import UsageError

TITLES = {"model": "model", "parallel": "layout", "scheduler": "scheduling and memory",
          "speculation": "speculative decoding", "server": "server", "process": "processes and logs",
          "models": "several models"}
_PREFIX = "setting_"


class Parser(argparse.ArgumentParser):
    """Wrong arguments end with code 2 and one line."""

    def error(self, message: str) -> NoReturn:
        """Print the line and exit."""
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists all options\n")


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Wide enough to read, and without `(default: None)`."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=110)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help


def add_command(commands: Any, name: str, text: str) -> Parser:
    """A subcommand's parser."""
    parser: Parser = commands.add_parser(name, help=text, description=text, formatter_class=_HelpFormatter,
                                         allow_abbrev=False)
    return parser


def add_settings(parser: argparse.ArgumentParser, sections: Sequence[str], *, model_argument: bool = True) -> None:
    """Add the options of `sections`, and the model as a positional argument."""
    if model_argument:
        text = field_docs(section_class("model"))["model"]
        parser.add_argument("model_argument", nargs="?", metavar="MODEL", help=text)
    general = parser.add_argument_group("configuration")
    general.add_argument("--config", metavar="FILE", help="TOML file with tables [model] [parallel] [scheduler] "
                         "[speculation] [server] [process] [models]. Options win over TANDEM_* variables, and those "
                         "over the file.")
    general.add_argument("--profile", choices=PROFILES, help="also read the environment variables of another system.")
    for section in sections:
        group = parser.add_argument_group(TITLES[section])
        for option in options():
            if option.section == section:
                _add(group, option)


def _add(group: Any, option: Option) -> None:
    flags = [option.flag, *ALIASES.get(option.name, ())]
    text = option.help.replace("%", "%%") + _default(option)
    target = _PREFIX + option.name
    if option.base is bool:
        group.add_argument(*flags, dest=target, action="append_const", const="true", help=text)
        group.add_argument("--no-" + option.flag.removeprefix("--"), dest=target, action="append_const", const="false",
                           help=argparse.SUPPRESS)
        return
    metavar = {int: "N", float: "X"}.get(option.base, "TEXT")
    if option.choices:
        metavar = "{" + ",".join(option.choices) + "}"
    group.add_argument(*flags, dest=target, action="append", metavar=metavar, help=text)


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
    return load(flags, environment=variables(), config_file=arguments.config, profile=arguments.profile)


def fail(message: str) -> int:
    """One line on stderr; the exit code for a mistake of the user's."""
    print(f"tandem: {message}", file=sys.stderr)
    return 2
