"""From the bytes of a body to a checked structure, or to an error that names the field. Pure.

What a body may hold is bounded while it is read, and the first error ends it: a body of millions of small mistakes
costs no more than one of one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json

from tandem.errors import RequestError

LARGE_BODY = 256 * 1024
"""Bytes from which on a body is judged in a worker process before anything is made of it here."""
MAX_VALUES = 100_000
"""Texts, objects, lists and names of fields in a large body: making each costs a tenth of a microsecond or more."""
MAX_NUMBERS = 2**20
"""Numbers in one: they are token ids."""

Harmless = Callable[[Any], bool]


def anything(_: Any) -> bool:
    """Every value of the field is harmless."""
    return True


def only(*values: Any) -> Harmless:
    """These values of the field are harmless, and null."""
    return lambda value: value is None or value in values


IGNORED: Mapping[str, Harmless] = {
    # Say nothing about the text.
    "user": anything,
    "metadata": anything,
    "safety_identifier": anything,
    "prompt_cache_key": anything,
    "prompt_cache_retention": anything,
    "service_tier": anything,
    "parallel_tool_calls": anything,
    # Do nothing with these values; anything else would need a feature that is not here.
    "store": only(False),
    "tools": only([]),  # in completions
    "tool_choice": only("none", "auto"),
    "functions": only([]),
    "function_call": only("none", "auto"),
    "audio": only(),
    "modalities": only(["text"]),
    "prediction": only(),
    "reasoning_effort": only(),
    "verbosity": only("medium"),
    "web_search_options": only(),
    "suffix": only(""),
    "thinking_token_budget": only(),
}
"""Fields that OpenAI or vLLM know and this server does not support, with the test for a value that is harmless."""

ADAPTERS = frozenset({"adapter", "adapters", "adapter_path", "lora", "lora_name", "lora_path", "lora_request"})
"""Fields by which other servers are asked for a LoRA adapter."""

Model = TypeVar("Model", bound=BaseModel)


def parse_bytes(raw: bytes, model: type[Model], ignored: Mapping[str, Harmless] = IGNORED) -> Model:
    """A JSON body as `model`. Raises RequestError naming the first field at fault."""
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
    return checked(_without_ignored(data, model, ignored), model)


def _count(data: Any) -> None:
    """Raises RequestError when there is more in it than a request can need."""
    values, numbers, left = MAX_VALUES, MAX_NUMBERS, [data]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            values -= 2 * len(one)
            parts = list(one.values()) if values >= 0 else []
        else:
            others = [part for part in one if type(part) is not int] if len(one) <= numbers + values else one
            values -= len(others)
            numbers -= len(one) - len(others)
            parts = others if values >= 0 else []
        if values < 0 or numbers < 0:
            raise RequestError(f"The request body holds too much: at most {MAX_VALUES} values and {MAX_NUMBERS} token "
                               "ids are allowed in one request.", code="too_many_values")
        left += [part for part in parts if isinstance(part, dict | list)]


def checked(data: dict[str, Any], model: type[Model]) -> Model:
    """`data` as `model`. Raises RequestError naming the first field at fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise explain(error.errors(include_url=False, include_input=False)[0]) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, with a field at fault called as its client calls it."""
    name = names.get(error.param or "")
    if name is not None:
        error.message = error.message.replace(f"'{error.param}'", f"'{name}'")
        error.param = name
    return error


def _without_ignored(
    data: dict[str, Any], model: type[BaseModel], ignored: Mapping[str, Harmless]
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in data.items():
        harmless = ignored.get(name) if name not in model.model_fields else None
        if name == "best_of":  # the best of n candidates when it is larger than n
            harmless = only(1, data.get("n"))
        if name in ADAPTERS:
            message = (f"'{name}' is not supported: an adapter is asked for by its name as 'model', which the server "
                       "gets with --lora-modules NAME=DIRECTORY (GET /v1/models lists them).")
            raise RequestError(message, param=name, code="unsupported_parameter")
        if harmless is None:
            if len(kept) > len(model.model_fields):
                break  # one of them is unknown, and so named
            kept[name] = value
        elif not harmless(value):
            message = f"'{name}' is not supported by this server; leave it out."
            raise RequestError(message, param=name, code="unsupported_parameter")
    return kept


def explain(detail: ErrorDetails) -> RequestError:
    """One line in OpenAI's words for one of pydantic's errors."""
    kind = detail["type"]
    path = ""
    for part in detail["loc"]:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    if kind == "extra_forbidden":
        return RequestError(f"Unknown parameter: '{path}'.", param=path, code="unknown_parameter")
    if kind == "missing":
        return RequestError(f"Missing required parameter: '{path}'.", param=path, code="missing_required_parameter")
    message = detail["msg"].replace("Input should be", "expected", 1)
    where = f"Invalid '{path}': " if path else ""
    code = "invalid_type" if kind.endswith("_type") else "invalid_value"
    if kind == "unsupported":
        code = "unsupported_value"
    return RequestError(f"{where}{message}.", param=path or None, code=code)
