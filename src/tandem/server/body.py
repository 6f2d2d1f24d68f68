"""Read request bodies and validate them against their schemas."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from tandem.config.options import nearest
from tandem.errors import RequestError, TooLargeError
from tandem.server.body_validation import LARGE_BODY, Model, explain, parse_bytes
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import Api, get_api, get_group, note_ignored, unless_gone
from tandem.server.failures import ClientGone, error_response, refused

BODY_TIMEOUT_S = 60.0
"""Time limit, in seconds, for receiving a whole request body."""
Result = TypeVar("Result")


async def read_body(request: Request, limit: int) -> bytes:
    """Return the whole body. Raises TooLargeError above `limit` bytes, with or without a Content-Length.

    Raises RequestError (408) after `BODY_TIMEOUT_S`, and ClientGone on disconnect.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise _too_large(limit)
    chunks = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for chunk in request.stream():
                chunks += chunk
                if len(chunks) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise refused(408, f"The request body did not arrive within {BODY_TIMEOUT_S:.0f}s.", code="request_timeout") from None
    except ClientDisconnect:
        raise ClientGone("The client left.") from None
    return bytes(chunks)


def outgrown(param: str, limit: int, remedy: str = "") -> RequestError:
    """Return the error of a stored conversation that is over `limit` bytes with the request's part."""
    message = f"The conversation has become larger than the limit of {limit} bytes (--max-body-mb){remedy}."
    return RequestError(message, param=param, code="context_length_exceeded")


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The request body is larger than the limit of {limit} bytes (--max-body-mb).")


async def parse(request: Request, model: type[Model]) -> Model:
    """Read the request's body, validate it as `model`, and count the request against its client's quotas.

    Raises RequestError naming the first invalid field, OverloadedError beyond a quota.
    """
    api = get_api(request)
    return await _understood(request, api, await read_body(request, api.max_body), model)


async def understood(request: Request, raw: bytes, model: type[Model]) -> Model:
    """Like `parse`, for a body `raw` that has been read already."""
    return await _understood(request, get_api(request), raw, model)


async def _understood(request: Request, api: Api, raw: bytes, model: type[Model]) -> Model:
    api.quotas.enter(request.scope)
    request.scope["tandem.body_size"] = len(raw)
    unknown = api.settings.server.unknown_fields
    if len(raw) > LARGE_BODY:
        task = {"schema": model.__name__, "body": raw, "unknown": unknown}
        await unless_gone(request, api.workers.ask(get_group(request), "judge", task, type(None)))
    fields, left_out = await off_loop(len(raw) > LARGE, parse_bytes, raw, model, unknown)
    if left_out:
        note_ignored(request, *left_out)
    return fields


async def translated(request: Request, work: Callable[[], Result]) -> Result:
    """Return `work()`; run in a thread if the request's body is larger than `LARGE_BODY`."""
    return await off_loop(request.scope.get("tandem.body_size", 0) > LARGE_BODY, work)


async def refuse_query(request: Request, error: Exception) -> Response:
    """Return FastAPI's error about a query parameter in OpenAI's error envelope (an exception handler)."""
    assert isinstance(error, RequestValidationError)
    detail = error.errors()[0]
    detail["loc"] = detail["loc"][1:]  # without "query"
    return error_response(explain(detail), request.scope)


def require_known(names: Iterable[str], known: Collection[str]) -> None:
    """Raise RequestError if one of the query parameters `names` is not in `known`."""
    for name in names:
        if name not in known:
            raise RequestError(
                f"There is no query parameter {name[:100]!r}{nearest(name[:100], known)}; there are: {', '.join(known)}.",
                param=name[:100],
            )
