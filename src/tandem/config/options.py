"""Options derived from the settings' dataclasses: one per field, with its flag, variable, parser and help text.

The command line, the environment, the TOML file and docs/configuration.md all use them, so they cannot diverge. Help texts
are the docstrings below the fields, read from the source with `ast`.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from tandem.config.settings import Settings, Within
from tandem.errors import ConfigError

ALIASES: dict[str, tuple[str, ...]] = {
    "served_name": ("--served-model-name",),
    "max_context": ("--max-model-len",),
    "pipeline_parallel_size": ("-pp",),
    "tensor_parallel_size": ("-tp",),
    "data_parallel_size": ("-dp",),
    "max_batch_size": ("--max-num-seqs",),
    "memory_fraction": ("--gpu-memory-utilization",),
    "enable_metrics": ("--metrics",),
    "log_requests": ("--enable-log-requests",),
    "tls_cert": ("--ssl-certfile",),
    "tls_key": ("--ssl-keyfile",),
    "num_speculative_tokens": ("--num-draft-tokens",),
}
"""Alternative flags by field name, known from vLLM and related servers."""

RENAMED = {
    "also": "extra_models",
    "canary": "self_check",
    "keep": "pinned_models",
    "lanes": "micro_batches",
    "max_queue": "max_queued_requests",
    "spares": "standby_ranks",
    "warm": "warmup_prompts",
}
"""Former name -> present name of a setting. A former flag, variable, TOML key or keyword works for one release, with a
warning."""

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("0", "false", "no", "off")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Option:
    """One field of a section of `Settings`."""

    section: str
    """Name of the section: field of `Settings` and table of the TOML file."""
    name: str
    """Name of the field in the section's dataclass, and key in the TOML table."""
    help: str
    """Docstring below the field, joined to one line."""
    default: object
    base: type
    """Type of the value, or of each item when `repeated`: str, int, float or bool."""
    choices: tuple[str, ...] = ()
    """Allowed values; empty allows any."""
    optional: bool = False
    """True if None is allowed."""
    repeated: bool = False
    """True if the value is a tuple of `base`."""
    within: Within | None = None
    """Range of numbers, or of the length of texts; None allows any."""

    @property
    def flag(self) -> str:
        """Flag, such as `--pipeline-parallel-size`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """Environment variable, such as `TANDEM_PIPELINE_PARALLEL_SIZE`."""
        return "TANDEM_" + self.name.upper()

    def parse(self, texts: Sequence[str], *, label: str) -> object:
        """Parse `texts` (several for a repeated option; else the last counts) to the option's value.

        Raises ConfigError that names `label`, the text and the allowed values.
        """
        if not self.repeated:
            return self._parse_one(texts[-1].strip(), label)
        items = [item.strip() for text in texts for item in text.split(",")]
        return tuple(self._parse_one(item, label) for item in items)

    def convert(self, value: object, *, label: str) -> object:
        """Check and convert a typed value (TOML): lists become tuples, integers become floats. Raises ConfigError."""
        if self.repeated and isinstance(value, list):
            return tuple(self._convert_one(item, label) for item in value)
        converted = self._convert_one(value, label)
        return (converted,) if self.repeated else converted

    def _parse_one(self, text: str, label: str) -> object:
        if self.base is bool:
            if text.lower() not in _TRUE + _FALSE:
                raise ConfigError(f"{label}: {text!r} is neither true nor false", param=self.name)
            return text.lower() in _TRUE
        if self.base in (int, float):
            try:
                return self.base(text)
            except ValueError:
                service = "; a Kubernetes Service named tandem sets it: enableServiceLinks: false in the pod" * ("://" in text)
                raise ConfigError(f"{label}: {text!r} is not {_NAMES[self.base]}{service}", param=self.name) from None
        return self._choice(text, label)

    def _convert_one(self, value: object, label: str) -> object:
        if self.base is float and type(value) is int:
            value = float(value) if abs(value) < 2**1023 else math.inf
        if type(value) is not self.base:
            raise ConfigError(f"{label}: {value!r} is not {_NAMES[self.base]}", param=self.name)
        return self._choice(str(value), label) if self.base is str else value

    def _choice(self, text: str, label: str) -> str:
        if not self.choices:
            return text
        for choice in self.choices:
            if choice.lower() == text.lower():
                return choice
        raise ConfigError(f"{label}: {text!r} is not one of {', '.join(self.choices)}", param=self.name)


_NAMES = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


@functools.cache
def options() -> tuple[Option, ...]:
    """Return all options, in the order of the fields. Cached."""
    found = []
    for section in section_names():
        settings_class = section_class(section)
        hints = typing.get_type_hints(settings_class, include_extras=True)
        texts = field_docs(settings_class)
        for field in dataclasses.fields(settings_class):
            shape = _shape(hints[field.name])
            found.append(Option(section=section, name=field.name, help=texts[field.name], default=field.default, **shape))
    return tuple(found)


@functools.cache
def by_name() -> dict[str, Option]:
    """Return options by field name, which is unique over all sections. Cached."""
    table = {option.name: option for option in options()}
    if len(table) != len(options()):
        raise TypeError("two sections of Settings have a field of the same name")
    return table


def renamed(name: str, former: str, warnings: list[str]) -> str:
    """Return the present name of a setting. For a former name append a warning that starts with `former`, the user's spelling."""
    if name not in RENAMED:
        return name
    option = by_name()[RENAMED[name]]
    spelled = option.flag if former.startswith("--") else option.variable if former.startswith("TANDEM_") else option.name
    warnings.append(f"{former} is now called {spelled}; the former name will go with the next release")
    return option.name


def nearest(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean ...?` with the most similar known name, or an empty string."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def section_names() -> tuple[str, ...]:
    """Return the sections' names in the order of `Settings`."""
    return tuple(field.name for field in dataclasses.fields(Settings) if field.name != "named")


def section_class(section: str) -> type:
    """Return the dataclass of a section."""
    found: type = typing.get_type_hints(Settings)[section]
    return found


@functools.cache
def field_docs(settings_class: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, joined to one line.

    Raises TypeError for a field without one.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(settings_class)))
    body = tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else []
    texts: dict[str, str] = {}
    for statement, following in zip(body, [*body[1:], ast.Pass()], strict=True):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        value = following.value if isinstance(following, ast.Expr) else None
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            raise TypeError(f"{settings_class.__name__}.{statement.target.id} has no docstring under it")
        texts[statement.target.id] = " ".join(value.value.split())
    return texts


def _shape(hint: object) -> dict[str, Any]:
    """Return all that an option has of its field's type. Raises TypeError for an unsupported type."""
    shape: dict[str, Any] = {}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = (part for part in typing.get_args(hint) if part is not type(None))
        shape["optional"] = True
    if typing.get_origin(hint) is tuple:
        hint = typing.get_args(hint)[0]
        shape["repeated"] = True
    if typing.get_origin(hint) is Annotated:
        hint, shape["within"] = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        shape["choices"] = typing.get_args(hint)
        hint = str
    if hint not in _NAMES:
        raise TypeError(f"settings cannot have the type {hint!r}")
    return {"base": hint, **shape}
