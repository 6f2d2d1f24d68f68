"""Options of `tandem generate` and `tandem chat`: one for each plain field of `SamplingParams`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any, get_type_hints

from tandem.config.options import field_docs
from tandem.errors import UsageError
from tandem.protocol.ranges import RANGES
from tandem.protocol.request import SamplingParams

DEFAULTS: Mapping[str, Any] = {"max_tokens": 256, "temperature": 0.7}
"""In a terminal; elsewhere those of `SamplingParams` hold."""
_KINDS: dict[Any, Callable[[str], Any]] = {int: int, float: float, int | None: int}
_LEFT_OUT = ("logprobs",)  # a terminal shows text


def add_sampling(group: argparse._ArgumentGroup) -> None:
    """Add the options."""
    hints, docs = get_type_hints(SamplingParams), field_docs(SamplingParams)
    for name, default in _fields().items():
        flag, text = "--" + name.replace("_", "-"), docs[name].replace("%", "%%")
        if name in RANGES:
            text = f"{text.rstrip('.')}. [{default}]"
        if hints[name] in _KINDS:
            group.add_argument(flag, type=_KINDS[hints[name]], default=default,
                               metavar="X" if hints[name] is float else "N", help=text)
        elif hints[name] is bool:
            group.add_argument(flag, action="store_true", help=text)
        else:
            group.add_argument(flag, action="append", default=[], metavar="TEXT", help=text + " May be repeated.")


def sampling_of(arguments: argparse.Namespace) -> SamplingParams:
    """What the options say. Raises UsageError for a value that is out of its range."""
    given: dict[str, Any] = {name: getattr(arguments, name) for name in _fields()}
    for name, allowed in RANGES.items():
        if given[name] not in allowed:
            raise UsageError(f"--{name.replace('_', '-')} {given[name]}: must be {allowed}", param=name)
    return SamplingParams(**{**given, "stop": tuple(given["stop"])})


def _fields() -> dict[str, Any]:
    """Names of the fields that have an option, and their defaults in a terminal."""
    plain = (*_KINDS, bool, tuple[str, ...])
    hints, standard = get_type_hints(SamplingParams), SamplingParams()
    return {name: DEFAULTS.get(name, getattr(standard, name)) for name in SamplingParams.__struct_fields__
            if hints[name] in plain and name not in _LEFT_OUT}
