"""One client's connection: uvicorn's, with a clock for what its client has to send and to read.

A client that sends nothing, half a header, a body that nobody waits for, or that does not read its answer would hold a
descriptor for ever. Time is counted from the beginning of each of these, so that a byte now and then gains nothing.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tandem.errors import RequestError
from tandem.server.failures import error_response

HEAD_S = 20.0
"""Seconds in which the header of a request must arrive, from its first byte, or from the beginning of a connection."""
LINGER_S = 5.0
"""Seconds for the rest of a body whose request has been answered already."""
STALL_S = 120.0
"""Seconds after which a client that reads nothing of its answer is given up."""


def too_slow() -> RequestError:
    """What a client is told whose header does not come."""
    error = RequestError(f"The request's header did not arrive within {HEAD_S:g}s.", code="request_timeout")
    error.status = 408
    return error


class Connection(H11Protocol):
    """uvicorn's protocol. `look` is to be called now and then; `on_lost` is called once, at the end."""

    on_lost: Callable[[], None] = staticmethod(lambda: None)
    group = ""
    """Whose connections it counts among."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The clock for the first header runs."""
        super().connection_made(transport)
        self.since = self.loop.time()
        """When it was opened, or when its last answer was out."""
        self._due = self.since + HEAD_S
        self._unread = (0, 0.0)
        """Bytes that the client has not taken, and since when it takes none."""

    def connection_lost(self, exc: Exception | None) -> None:
        """It is over."""
        super().connection_lost(exc)
        self.on_lost()

    @property
    def idle(self) -> bool:
        """No request is being worked on, so that nothing is lost when it is closed."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Bytes of a request."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._due = min(self._due, self.loop.time() + HEAD_S)
        elif self.conn.their_state is h11.SEND_BODY and self.idle:
            self._due = min(self._due, self.loop.time() + LINGER_S)
        else:
            self._due = math.inf

    def on_response_complete(self) -> None:
        """An answer is out. What is left of its request, or has come of the next one, has its time."""
        self.since, self._due = self.loop.time(), math.inf
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:
            self._due = self.loop.time() + LINGER_S
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._due = self.loop.time() + HEAD_S

    def look(self, now: float) -> None:
        """Close the connection if its client has had its time, at the event loop's time `now`."""
        unread = self.transport.get_write_buffer_size()
        if unread == 0 or unread != self._unread[0]:
            self._unread = (unread, now)
        elif now - self._unread[1] > STALL_S:
            self.transport.abort()
            return
        if now <= self._due or self.transport.is_closing():
            return
        if self.conn.their_state is h11.IDLE and self.conn.our_state is h11.IDLE and self.conn.trailing_data[0]:
            self._refuse(too_slow())
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What came is not HTTP: say so as all errors are said. Called by uvicorn while it handles h11's error."""
        reason = sys.exception()
        error = RequestError(f"{msg.rstrip('.')}: {reason}" if reason is not None else msg, code="invalid_http")
        error.status = getattr(reason, "error_status_hint", 400)
        self._refuse(error)

    def _refuse(self, error: RequestError) -> None:
        """Answer in place of the application, if nothing of its answer is out yet, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the application still says is not sent
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(error)
            headers = [*response.raw_headers, (b"connection", b"close")]
            for event in (h11.Response(status_code=error.status, headers=headers, reason=_phrase(error.status)),
                          h11.Data(data=bytes(response.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def _phrase(status: int) -> bytes:
    return STATUS_PHRASES.get(status, b"")


def refusing(error: RequestError) -> Any:
    """An ASGI application that answers every request with `error` and closes the connection."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        response = error_response(error, scope["path"])
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    return app
