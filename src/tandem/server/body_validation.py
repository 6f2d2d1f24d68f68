"""Parse and validate a request body; errors name the field. Pure.

Sizes are bounded while parsing, and the first error ends it: a body with millions of mistakes costs no more than a
body with one.
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
"""Bytes above which a body is first validated in a worker process."""
MAX_VALUES = 100_000
"""Most strings, objects, lists and field names in a large body: each costs 0.1 microseconds or more to create."""
MAX_NUMBERS = 2**20
"""Most numbers in a large body; they are token ids."""

Model = TypeVar("Model", bound=BaseModel)


def parse_bytes(raw: bytes, model: type[Model], unknown: Unknown = "refuse") -> tuple[Model, list[str]]:
    """Return a JSON body as `model`, and the names of ignored fields. `unknown`: value of --unknown-fields.

    Raises RequestError naming the first invalid field.
    """
    try:
        data = from_json(raw, allow_inf_nan=False)
    except ValueError as error:
        try:
            raw.decode()
        except UnicodeDecodeError as bad:
            raise RequestError(f"The request body is not valid UTF-8 (byte {bad.start}).", code="invalid_utf8") from None
        raise RequestError(f"The request body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(data, dict):
        raise RequestError("The request body must be a JSON object.", code="invalid_json")
    if len(raw) > LARGE_BODY:
        _count(data)
    kept, left_out, names = without_strangers(data, model, unknown)
    with in_words(names):
        return checked(kept, model, unknown, left_out), left_out


def _count(data: JsonObject | list[object]) -> None:
    """Raise RequestError if the parsed body has more than `MAX_VALUES` values or `MAX_NUMBERS` integers."""
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
    """Return `data` as `model`. Unknown nested fields are ignored unless `unknown` is "refuse"; `left_out` gets their paths.

    Raises RequestError naming the first invalid field.
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
    """Rename the field in a RequestError raised inside to the client's name for it (`names`: ours to the client's)."""
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
    """Convert a pydantic error to a RequestError in OpenAI's words; `model`, the body's schema, helps to suggest names."""
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
