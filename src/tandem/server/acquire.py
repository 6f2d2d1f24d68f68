"""Find the model that a request names, load it if necessary, and hold it until the request ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import Request

from tandem.errors import NotFoundError, RequestError, TimeoutExceeded
from tandem.server.context import get_api, unless_gone
from tandem.server.engines.model_pool import ModelPool
from tandem.server.engines.served_model import Served
from tandem.server.sse import KEEP_ALIVE, REFUSAL_GRACE_S, failed_stream, start_stream


def find_model(http: Request, name: str | None) -> Served:
    """Return the model named `name` (None: the default), loaded or not. Raises NotFoundError, UnavailableError."""
    api = get_api(http)
    api.check_open()
    try:
        return api.find(name)
    except NotFoundError:
        api.check()  # until the engine has reported its own model name, the answer is 503, not 404
        raise


async def acquire(
    http: Request, name: str | None, *, stream: bool | None = False, error: Callable[[RequestError], bytes] = failed_stream
) -> Served:
    """Return the model named `name`; in a model pool, wait until loaded and hold it until the request ends.

    A `stream` that waits long gets its headers and keep-alive comments first; `error` encodes a later failure.
    Raises RequestError.
    """
    served, model_pool = find_model(http, name), get_api(http).model_pool
    if model_pool is None:
        return served
    if model_pool.available(served):
        await _enter(http, served, model_pool)
    elif stream:
        await _wait_in_stream(http, served, model_pool, error)
    else:
        await _wait(http, served, model_pool)
    return served


async def _enter(http: Request, served: Served, model_pool: ModelPool) -> None:
    await model_pool.enter(served)
    http.scope["tandem.entered"] = served  # at once, so that `Api.release` undoes it even after a cancellation


async def _wait(http: Request, served: Served, model_pool: ModelPool) -> None:
    limit = get_api(http).settings.server.request_timeout
    try:
        async with asyncio.timeout(limit):
            await unless_gone(http, _enter(http, served, model_pool))
    except TimeoutError:
        raise TimeoutExceeded(f"The model was not loaded within {limit:g}s.", code="request_timeout") from None


async def _wait_in_stream(http: Request, served: Served, model_pool: ModelPool, error: Callable[[RequestError], bytes]) -> None:
    waiting = asyncio.create_task(_wait(http, served, model_pool))
    try:
        await asyncio.wait((waiting,), timeout=REFUSAL_GRACE_S)
        while not waiting.done():
            await start_stream(http.scope, http.scope["tandem.send"], error)
            await http.scope["tandem.send"]({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
            await asyncio.wait((waiting,), timeout=get_api(http).heartbeat_s)
        waiting.result()
    finally:
        waiting.cancel()
