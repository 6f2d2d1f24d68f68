"""From the bytes of a body to a checked structure, or to an error that names the field. Pure.

What a body may hold is bounded while it is read, and the first error ends it: a body of millions of small mistakes
costs no more than one of one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from tandem.errors import RequestError
from tandem.json_types import JsonObject
from tandem.server.fields import LONGEST_PATH, Unknown, fields_beside, unknown_field, without_strangers

LARGE_BODY = 256 * 1024
"""Bytes from which on a body is judged in a worker process before anything is made of it here."""
MAX_VALUES = 100_000
"""Texts, objects, lists and names of fields in a large body: making each costs a tenth of a microsecond or more."""
MAX_NUMBERS = 2**20
"""Numbers in a large body: they are token ids."""

Model = TypeVar("Model", bound=BaseModel)


def parse_bytes(raw: bytes, model: type[Model], unknown: Unknown = "refuse") -> tuple[Model, list[str]]:
    """Return a JSON body as `model`, and the names of fields that were left out. `unknown`: value of --unknown-fields.

    Raises RequestError naming the first field at fault.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        try:
            raw.decode()
        except UnicodeDecodeError as bad:
            message = f"The request body is not valid UTF-8 (byte {bad.start})."
            raise RequestError(message, code="invalid_utf8") from None
        raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_json")
    if len(raw) > LARGE_BODY:
        _count(data)
    kept, left_out, names = without_strangers(data, model, unknown)
    with in_words(names):
        return checked(kept, model, unknown, left_out), left_out


def _count(data: JsonObject | list[object]) -> None:
    """Raises RequestError when there is more in it than a request can need."""
    values, numbers = MAX_VALUES, MAX_NUMBERS
    left: list[JsonObject | list[object]] = [data]
    while left:
        container = left.pop()
        if isinstance(container, dict):
            values -= 2 * len(container)
            parts = list(container.values()) if values >= 0 else []
        else:
            large = len(container) > numbers + values
            others = container if large else [part for part in container if type(part) is not int]
            values -= len(others)
            numbers -= len(container) - len(others)
            parts = others if values >= 0 else []
        if values < 0 or numbers < 0:
            raise RequestError(
                f"The request body holds too much: at most {MAX_VALUES} values and {MAX_NUMBERS} token "
                "ids are allowed in one request.",
                code="too_many_values",
            )
        left += [part for part in parts if isinstance(part, dict | list)]


def checked(data: JsonObject, model: type[Model], unknown: Unknown = "refuse", left_out: list[str] | None = None) -> Model:
    """Return `data` as `model`; unknown fields within others are left out where wanted, and added to `left_out`.

    Raises RequestError naming the first field at fault.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        wrong = error.errors(include_url=False, include_input=False)
    strangers = [_path(detail) for detail in wrong if detail["type"] == "extra_forbidden"]
    if not strangers or unknown == "refuse":
        raise explain(wrong[0], model)
    if left_out is not None:
        left_out += strangers
    try:
        return model.model_validate(data, extra="ignore")
    except ValidationError as error:
        raise explain(error.errors(include_url=False, include_input=False)[0], model) from None


@contextlib.contextmanager
def in_words(names: Mapping[str, str]) -> Iterator[None]:
    """Have a RequestError that is raised inside call the field at fault as its client does."""
    try:
        yield
    except RequestError as error:
        name = names.get(error.param or "")
        if name is not None:
            error.message = error.message.replace(f"'{error.param}'", f"'{name}'")
            error.param = name
        raise error from None


def _path(detail: ErrorDetails) -> str:
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path[:LONGEST_PATH]


def explain(detail: ErrorDetails, model: type[BaseModel] | None = None) -> RequestError:
    """Return one of pydantic's errors, found in a body of this schema, in OpenAI's words."""
    kind, path = detail["type"], _path(detail)
    if kind == "extra_forbidden":
        return unknown_field(path, fields_beside(model, detail["loc"]) if model is not None else ())
    if kind == "missing":
        return RequestError(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
    message = detail["msg"].replace("Input should be", "expected", 1)
    where = f"Invalid '{path}': " if path else ""
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if kind == "unsupported":
        code = "unsupported_value"
    return RequestError(f"{where}{message}.", param=path or None, code=code)
