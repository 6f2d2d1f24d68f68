"""Options of `tandem generate` and `tandem chat`, including one for each scalar field of `SamplingParams`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import get_type_hints

from tandem.cli.arguments import Parser, add_server, add_settings
from tandem.config.options import field_docs
from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.protocol.ranges import RANGES
from tandem.protocol.request import SamplingDefaults, SamplingParams

DEFAULTS: Mapping[str, float] = {"max_tokens": 256, "temperature": 0.7}
"""Defaults in a terminal, below the options and the model's generation_config.json."""
CHAT_DEFAULTS: Mapping[str, float] = {**DEFAULTS, "max_tokens": 2048}
OFTEN = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")
"""Options that `--help` shows; `--help-all` shows all."""
KINDS: dict[object, Callable[[str], float]] = {int: int, float: float, int | None: int}
EFFORTS = {"default": None, "true": "medium", "false": "none", **{name: name for name in ("none", "low", "medium", "high")}}
"""Values of `reasoning_effort`, by the value of --think."""
LEFT_OUT = ("logprobs", "prompt_logprobs")
"""Fields without an option, since a terminal shows only text."""


def add_generate(parser: Parser) -> None:
    """Add the options of `tandem generate`."""
    group = parser.add_argument_group("prompt")
    group.add_argument("--prompt", "-p", help="the text to complete; by default standard input.")
    _add_both(parser, group, DEFAULTS)


def add_chat(parser: Parser) -> None:
    """Add the options of `tandem chat`."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", help="a system message to begin with.")
    group.add_argument(
        "--image", action="append", default=[], metavar="FILE", help="a picture to send with the first message. May be repeated."
    )
    group.add_argument("--think", choices=EFFORTS, metavar="HOW", help="how a model reasons: true, false, low, medium, high.")
    _add_both(parser, group, CHAT_DEFAULTS)
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="one message: print the answer to it, and end.")


def _add_both(parser: Parser, group: argparse._ArgumentGroup, defaults: Mapping[str, float]) -> None:
    group.add_argument("--local", action="store_true", help="load the model here, also if a server has it.")
    _add_sampling(parser, defaults)
    add_server(parser)
    add_settings(parser, ("model", "parallel", "scheduler", "speculation"))


def _add_sampling(parser: Parser, defaults: Mapping[str, float]) -> None:
    group = parser.add_argument_group("sampling")
    hints, docs = get_type_hints(SamplingParams), field_docs(SamplingParams)
    for name, standard in _fields().items():
        flag, text = "--" + name.replace("_", "-"), docs[name].replace("%", "%%")
        if name in RANGES:
            own = "the model's own, else " if name in SamplingDefaults.__struct_fields__ else ""
            text = f"{text.rstrip('.')}. [{own}{defaults.get(name, standard)}]"
        if hints[name] in KINDS:
            action = group.add_argument(flag, type=KINDS[hints[name]], metavar="X" if hints[name] is float else "N", help=text)
        elif hints[name] is bool:
            action = group.add_argument(flag, action="store_true", default=None, help=text)
        else:
            action = group.add_argument(flag, action="append", metavar="TEXT", help=text + " May be repeated.")
        if name not in OFTEN:
            parser.seldom.add(action)


def asked_of(arguments: argparse.Namespace) -> JsonObject:
    """Return the sampling parameters set by options, by name. Raises UsageError for a value out of range."""
    params = {name: value for name in _fields() if (value := getattr(arguments, name)) is not None}
    if think := getattr(arguments, "think", None):
        params["reasoning_effort"] = EFFORTS[think]
    for name, value in params.items():
        if name in RANGES and value not in RANGES[name]:
            raise UsageError(f"--{name.replace('_', '-')} {value}: must be {RANGES[name]}", param=name)
    return {name: tuple(value) if isinstance(value, list) else value for name, value in params.items()}


def _fields() -> dict[str, object]:
    """Return the fields that have an option, with their defaults."""
    plain = (*KINDS, bool, tuple[str, ...])
    hints, standard = get_type_hints(SamplingParams), SamplingParams()
    return {
        name: getattr(standard, name)
        for name in SamplingParams.__struct_fields__
        if hints[name] in plain and name not in LEFT_OUT
    }
