"""Answers of a model that may have to be loaded first: a stream begins at once, and is kept awake until then."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from fastapi import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from tandem.errors import NotFoundError, RequestError, TimeoutExceeded
from tandem.server.context import get_api, unless_gone
from tandem.server.engines.residents import Residents
from tandem.server.engines.served_model import Served
from tandem.server.failures import ClientGone, internal_error
from tandem.server.sse import HEADERS, KEEP_ALIVE, REFUSAL_GRACE_S, failed_stream

Answer = Callable[[Served], Awaitable[Response]]
WriteError = Callable[[RequestError], bytes]


async def answered_by(http: Request, model: str | None, answer: Answer, *, stream: bool | None,
                      error: WriteError = failed_stream) -> Response:
    """What `answer` makes of the request with the model that it names, once that is loaded.

    A `stream` that has to wait begins before that; what then fails is written by `error`. Raises RequestError.
    """
    api = get_api(http)
    if not stream or api.residents is None or api.residents.available(api.find(model)):
        return await answer(await engage(http, model))
    entering = asyncio.create_task(engage(http, model))
    try:
        await asyncio.wait((entering,), timeout=REFUSAL_GRACE_S)
        if entering.done():
            return await answer(entering.result())
    except BaseException:
        entering.cancel()
        raise
    return LateStream(entering, answer, error, api.heartbeat_s)


def find_model(http: Request, name: str | None) -> Served:
    """The model that a request names, loaded or not. Raises RequestError."""
    api = get_api(http)
    api.check_open()
    try:
        return api.find(name)
    except NotFoundError:
        api.check()  # the engine, which may have another name for it, must have been heard
        raise


async def engage(http: Request, name: str | None) -> Served:
    """The model that a request names; of several it is loaded, and stays so until the request ends. Raises
    RequestError."""
    api, served = get_api(http), find_model(http, name)
    if api.residents is not None:
        if api.residents.available(served):
            await _enter(http.scope, served, api.residents)
        else:
            await _wait(http, served, api.residents)
    return served


async def _enter(scope: Scope, served: Served, residents: Residents) -> None:
    await residents.enter(served)
    scope["tandem.entered"] = served  # at once: a wait that is cancelled meanwhile must still be left


async def _wait(http: Request, served: Served, residents: Residents) -> None:
    limit = get_api(http).settings.server.request_timeout
    try:
        async with asyncio.timeout(limit):
            await unless_gone(http, _enter(http.scope, served, residents))
    except TimeoutError:
        raise TimeoutExceeded(f"The model was not loaded within {limit:g}s.", code="request_timeout") from None


class LateStream(Response):
    """Comments while the model is loaded, then the stream that `answer` makes."""

    def __init__(self, entering: asyncio.Task[Served], answer: Answer, error: WriteError, heartbeat_s: float) -> None:
        super().__init__()
        self._entering = entering
        self._answer = answer
        self._error = error
        self._heartbeat_s = heartbeat_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the end, an error, or the client's leaving."""
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        try:
            while not self._entering.done():
                await send({"type": "http.response.body", "body": KEEP_ALIVE, "more_body": True})
                await asyncio.wait((self._entering,), timeout=self._heartbeat_s)
            response = await self._answer(self._entering.result())
        except ClientGone:
            return
        except Exception as error:  # noqa: BLE001 - the status line is out: the client can only be told in the stream
            await self._fail(send, error if isinstance(error, RequestError) else internal_error(error, "a stream"))
            return
        finally:
            self._entering.cancel()

        async def go_on(message: Message) -> None:
            if message["type"] != "http.response.start":
                await send(message)

        await response(scope, receive, go_on)

    async def _fail(self, send: Send, error: RequestError) -> None:
        await send({"type": "http.response.body", "body": self._error(error), "more_body": False})
