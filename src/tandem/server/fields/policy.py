"""Fields that a body's schema does not have: accepted, left out or refused. Pure.

null is taken everywhere. Known fields of other servers are taken with the values of their table; what is left is
refused, or with `--unknown-fields warn` and `ignore` left out. Nothing is left out without a word: its name comes back.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Literal, get_args

from pydantic import BaseModel

from tandem.errors import RequestError
from tandem.server.fields.known import ADAPTERS, BY_SCHEMA, RENAMED, UNLIMITED

Unknown = Literal["refuse", "warn", "ignore"]
"""Values of --unknown-fields."""
MOST_NAMES, LONGEST_NAME = 20, 60
"""Most fields that a header or log line names, and characters of each name."""
LONGEST_PATH = 200
"""Most characters of a field's path in an error."""


def without_strangers(
    data: Mapping[str, object], model: type[BaseModel], unknown: Unknown
) -> tuple[dict[str, object], list[str], dict[str, str]]:
    """Return the fields of a body that its schema has, the names of fields left out although they ask for something,
    and by field of ours the name that the client used. Raises RequestError for a field that must not be left out."""
    kept: dict[str, object] = {}
    left_out: list[str] = []
    names: dict[str, str] = {}
    known = BY_SCHEMA.get(model.__name__, {})
    for name, value in data.items():
        ours = RENAMED.get(name)
        if name in model.model_fields:
            kept[name] = value
        elif value is None or (name in ADAPTERS and value in ([], {})):
            continue
        elif name in ADAPTERS:
            message = (f"'{name}' is not supported: an adapter is asked for by its name as 'model', which the server "
                       "gets with --lora-modules NAME=DIRECTORY (GET /v1/models lists them).")
            raise RequestError(message, param=name, code="unsupported_parameter")
        elif ours in model.model_fields:
            names |= _take_renamed(name, ours, value, data, kept)
        elif name == "best_of" and "n" in model.model_fields:
            # The best of n candidates when it is larger than n.
            if value not in (1, data.get("n")):
                _refuse(name, unknown, left_out)
        elif name not in known:
            if unknown == "refuse":
                raise unknown_field(name, {*model.model_fields, *known, *RENAMED})
            left_out.append(name)
        elif known[name].accepted is None:
            left_out.append(name)
        elif not known[name].accepts(value):
            _refuse(name, unknown, left_out)
    return kept, left_out, names


def _take_renamed(name: str, ours: str, value: object, data: Mapping[str, object],
                  kept: dict[str, object]) -> dict[str, str]:
    if isinstance(value, int) and (name, value) in UNLIMITED:
        return {}
    own = data.get(ours)
    if own is not None and own != value:
        raise RequestError(f"'{name}' and '{ours}' contradict each other; give one of them.", param=name,
                           code="invalid_value")
    kept[ours] = value
    return {ours: name}


def _refuse(name: str, unknown: Unknown, left_out: list[str]) -> None:
    if unknown == "refuse":
        raise RequestError(f"'{name}' is not supported by this server; leave it out.", param=name,
                           code="unsupported_parameter")
    left_out.append(name)


def unknown_field(path: str, known: Iterable[str]) -> RequestError:
    """Return the error for an unknown field, with the field beside it that may have been meant."""
    path = path[:LONGEST_PATH]
    *before, name = path.rsplit(".", 1)
    near = difflib.get_close_matches(name[:LONGEST_NAME], sorted(known), 1, cutoff=0.7)
    meant = f"; did you mean '{'.'.join([*before, near[0]])}'?" if near else "."
    return RequestError(f"Unknown parameter: '{path}'{meant}", param=path, code="unknown_parameter")


def fields_beside(model: type[BaseModel], place: tuple[int | str, ...]) -> set[str]:
    """Return the names of the fields that may stand where pydantic found a wrong one."""
    for part in place[:-1]:
        if isinstance(part, str):
            fields = {field.alias or name: field.annotation for name, field in model.model_fields.items()}
            inner = _schema_in(fields.get(part))
            if inner is None:
                return set()
            model = inner
    return {field.alias or name for name, field in model.model_fields.items()}


def _schema_in(annotation: object) -> type[BaseModel] | None:
    """Return the schema X of an annotation X, X | None or list[X]."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_schema_in(part) for part in get_args(annotation))
    return next((schema for schema in inner if schema is not None), None)


def told(names: Iterable[str]) -> str:
    """Return names for a header or a line of the log, whatever characters a client has put into them."""
    whole = list(names)
    shown = [ascii(name[:LONGEST_NAME])[1:-1].replace(",", "")[:LONGEST_NAME] for name in whole[:MOST_NAMES]]
    more = [f"and {len(whole) - MOST_NAMES} more"] if len(whole) > MOST_NAMES else []
    return ", ".join(shown + more)
