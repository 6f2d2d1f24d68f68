"""A request that comes from no connection, answered by the routes as if it had."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct
from starlette.types import ASGIApp, Message, Scope

from tandem.errors import RequestError
from tandem.server.context import Api
from tandem.server.failures import error_response


class StoredReply(Struct, frozen=True):
    """An HTTP response with a JSON body."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()


async def call(api: Api, app: ASGIApp, root: Any, route: str, body: bytes, group: str, gone: asyncio.Event,
               more: dict[str, Any]) -> StoredReply:
    """The response of `app` to a POST for a client. `gone`: whoever wanted it has left. `more` goes into the scope.

    Raises whatever the routes raise.
    """
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    response: list[Message] = []

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        response.append(message)

    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "http_version": "1.1", "method": "POST",
        "scheme": "http", "path": route, "raw_path": route.encode(), "root_path": "", "query_string": b"",
        "headers": headers, "client": None, "server": None, "app": root, "state": {}, "tandem.group": group,
        "tandem.trusted": True, **more}
    del body  # it may be large, and the answer may take long
    try:
        await app(scope, receive, send)
    finally:
        api.release(scope)
    whole = b"".join(message.get("body", b"") for message in response)
    return StoredReply(response[0]["status"], whole, tuple(response[0]["headers"]))


def reply_of(error: RequestError) -> StoredReply:
    """An error as the server answers it."""
    response = error_response(error)
    return StoredReply(response.status_code, bytes(response.body), tuple(response.raw_headers))
