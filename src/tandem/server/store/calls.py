"""Internal calls: run a request through the routes without a connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from msgspec import Struct
from starlette.types import ASGIApp, Message, Scope

from tandem.errors import RequestError
from tandem.server.context import Api
from tandem.server.engines.model_pool import LOAD_FAILED
from tandem.server.failures import error_response, internal_error
from tandem.server.gate import record_request

LONGEST_PAUSE_S = 10.0
"""Most seconds between two attempts of a refused request, whatever its Retry-After."""


class StoredReply(Struct, frozen=True):
    """An HTTP response with a JSON body."""

    status: int
    body: bytes
    headers: tuple[tuple[bytes, bytes], ...] = ()

    @property
    def retry_s(self) -> float | None:
        """Seconds until a retry, at most `LONGEST_PAUSE_S`; None for a final answer."""
        if self.status not in (429, 503) or LOAD_FAILED.encode() in self.body:
            return None
        return min(float(dict(self.headers).get(b"retry-after", b"1")), LONGEST_PAUSE_S)


def post_scope(root: object, route: str, group: str, size: int) -> Scope:
    """Return the ASGI scope of a POST of `size` bytes of JSON, authenticated as `group`, to the application `root`."""
    headers = [(b"content-type", b"application/json"), (b"content-length", str(size).encode())]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": route,
        "raw_path": route.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": None,
        "server": None,
        "app": root,
        "state": {},
        "tandem.group": group,
        "tandem.trusted": True,
    }


async def call(
    api: Api, app: ASGIApp, root: object, route: str, body: bytes, group: str, gone: asyncio.Event, more: Mapping[str, object]
) -> StoredReply:
    """POST `body` to `route` of `app` on behalf of `group` and return the response; exceptions become error responses.

    `gone`: set to simulate a disconnect. `more`: further scope items.
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

    scope = {**post_scope(root, route, group, len(body)), **more}
    del body  # free the memory, as the answer may take long
    started = time.monotonic()
    try:
        await app(scope, receive, send)
        whole = b"".join(message.get("body", b"") for message in response)
        reply = StoredReply(response[0]["status"], whole, tuple(response[0]["headers"]))
    except RequestError as error:
        reply = reply_of(error, scope)
    except Exception as error:  # noqa: BLE001 - outermost handler, as in the gate: the client needs an answer
        reply = reply_of(internal_error(error, route), scope)
    finally:
        api.release(scope)
    if reply.retry_s is None:
        record_request(api, scope, reply.status, time.monotonic() - started)
    return reply


def reply_of(error: RequestError, scope: Scope | None = None) -> StoredReply:
    """Return an error as an HTTP response, and note it in `scope` for the log."""
    response = error_response(error)
    if scope is not None:
        scope["tandem.error"] = error
    return StoredReply(response.status_code, bytes(response.body), tuple(response.raw_headers))
