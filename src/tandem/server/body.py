"""From the bytes of a request to a checked structure, or to an error that names the field."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails, from_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tandem.errors import RequestError, TooLargeError
from tandem.server.chats.texts import off_loop
from tandem.server.failures import ClientGone, error_response

BODY_TIMEOUT_S = 60.0
"""Seconds that a client may take to send its body."""
LARGE_BODY = 256 * 1024
"""Bytes from which on a body is parsed in a thread."""

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


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises TooLargeError over `limit` bytes (with or without a declared length)."""
    declared = request.headers.get("content-length", "")
    too_large = TooLargeError(f"The request body is larger than the limit of {limit} bytes (--max-body-mb).")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    chunks = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                chunks += chunk
                if len(chunks) > limit:
                    raise too_large
    except TimeoutError:
        slow = RequestError(f"The request body did not arrive within {BODY_TIMEOUT_S:.0f}s.", code="request_timeout")
        slow.status = 408
        raise slow from None
    except ClientDisconnect:
        raise ClientGone("The client left.") from None
    return bytes(chunks)


async def parse(
    request: Request, model: type[Model], limit: int, *, ignored: Mapping[str, Harmless] = IGNORED
) -> Model:
    """The request's body as `model`, without what is `ignored`. Raises RequestError naming the first field at fault."""
    raw = await read_body(request, limit)
    return await off_loop(len(raw) > LARGE_BODY, lambda: parse_bytes(raw, model, ignored))


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
    return checked(_without_ignored(data, model, ignored), model)


def checked(data: dict[str, Any], model: type[Model]) -> Model:
    """`data` as `model`. Raises RequestError naming the first field at fault."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False, include_input=False)[0]) from None


def renamed(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """The same error, with a field at fault called as its client calls it."""
    name = names.get(error.param or "")
    if name is not None:
        error.message = error.message.replace(f"'{error.param}'", f"'{name}'")
        error.param = name
    return error


async def refuse_query(request: Request, error: Exception) -> Response:
    """Say which query parameter is at fault. FastAPI checks them, and has a shape of its own for what it finds."""
    assert isinstance(error, RequestValidationError)
    detail = error.errors()[0]
    detail["loc"] = detail["loc"][1:]  # without "query"
    return error_response(_explain(detail), request.url.path)


def _without_ignored(
    data: dict[str, Any], model: type[BaseModel], ignored: Mapping[str, Harmless]
) -> dict[str, Any]:
    kept = {}
    for name, value in data.items():
        harmless = ignored.get(name) if name not in model.model_fields else None
        if name == "best_of":  # the best of n candidates when it is larger than n
            harmless = only(1, data.get("n"))
        if name in ADAPTERS:
            message = (f"'{name}' is not supported: an adapter is asked for by its name as 'model', which the server "
                       "gets with --lora-modules NAME=DIRECTORY (GET /v1/models lists them).")
            raise RequestError(message, param=name, code="unsupported_parameter")
        if harmless is None:
            kept[name] = value
        elif not harmless(value):
            message = f"'{name}' is not supported by this server; leave it out."
            raise RequestError(message, param=name, code="unsupported_parameter")
    return kept


def _explain(detail: ErrorDetails) -> RequestError:
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
