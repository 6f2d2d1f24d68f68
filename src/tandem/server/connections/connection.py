"""One client's connection: uvicorn's, with a clock for what its client has to send and to read.

A client that sends nothing, half a header, a body that nobody waits for, or that does not read its answer would hold a
descriptor for ever. Time is counted from the beginning of each of these, so that a byte now and then gains nothing.
"""

from __future__ import annotations

import asyncio
import math
import re
import sys

import h11
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from tandem.crash_guard import start_task
from tandem.errors import RequestError
from tandem.server.connections.slots import ConnectionSlot
from tandem.server.failures import error_response, refused

HEAD_S = 20.0
"""Seconds in which the header of a request must arrive, from its first byte, or from the beginning of a connection."""
LINGER_S = 5.0
"""Seconds for the rest of a body whose request has been answered already."""
STALL_S = 120.0
"""Seconds after which a client that reads nothing of its answer is given up."""

MOST_AHEAD = 4096
"""Bytes of further requests that are taken from a client while one is worked on."""
MOST_HEADER = 64 * 1024
"""Bytes of a request's header, its first line included."""
MOST_LINES = 256
"""Lines that are read at once: some milliseconds. A header may not have more."""
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<rest>(?:[/?][^#]*)?)", re.IGNORECASE)
"""A request target in absolute form."""


def slice_end(data: bytes) -> int:
    """Return how many of the bytes to read at once.

    A body in chunks of a byte each costs its reader a thousand times what it costs its sender; what comes at once of it
    would hold up every other connection for seconds.
    """
    if data.count(b"\n") <= MOST_LINES:
        return len(data)
    end = 0
    for _ in range(MOST_LINES):
        end = data.index(b"\n", end) + 1
    return end


class _Requests(h11.Connection):
    """h11's end of a connection, with checks of each header that h11 leaves to its user."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return h11's next event. Raises h11.RemoteProtocolError."""
        before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if before - len(self.trailing_data[0]) > MOST_HEADER:  # h11 limits only what has not come to its end
            raise h11.RemoteProtocolError(f"the header has more than {MOST_HEADER} bytes", error_status_hint=431)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            raise h11.RemoteProtocolError("send Content-Length or Transfer-Encoding, not both (RFC 9112, section 6.1)")
        return _in_origin_form(event)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Return the request with a path as its target; the host of an absolute target replaces the header's (RFC 9112,
    section 3.2.2). Raises h11.RemoteProtocolError."""
    if request.target.startswith(b"/") or b"://" not in request.target.partition(b"?")[0]:
        return request
    absolute = _ABSOLUTE.fullmatch(request.target)
    if absolute is None:
        raise h11.RemoteProtocolError("the target is no http:// address with a host and without a user")
    rest = absolute["rest"]
    headers = [(b"host", absolute["host"]), *((name, value) for name, value in request.headers if name != b"host")]
    return h11.Request(
        method=request.method,
        target=rest if rest.startswith(b"/") else b"/" + rest,
        headers=headers,
        http_version=request.http_version,
    )


class _Flow(FlowControl):
    """Flow control of uvicorn that can be kept from resuming."""

    held = False

    def resume_reading(self) -> None:
        """Go on reading, unless `held` is set."""
        if not self.held:
            super().resume_reading()


class Connection(H11Protocol):
    """uvicorn's protocol, with `look` to be called now and then. `slot` hears when it is idle, busy and closed."""

    slice_turn: asyncio.Lock
    """Held while a slice is read; shared by all connections of the event loop."""
    slot: ConnectionSlot
    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the clock of the first header."""
        super().connection_made(transport)
        self.slot.close = transport.close
        self.flow = _Flow(transport)
        self.conn = _Requests(h11.SERVER, MOST_HEADER)
        self._left = b""
        """Received bytes that are still to be read."""
        self._due = self.loop.time() + HEAD_S
        self._unread = (0, 0.0)
        """Bytes that the client has not taken, and since when it takes none."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Give back its place."""
        self._left = b""
        super().connection_lost(exc)
        self.slot.leave()

    @property
    def idle(self) -> bool:
        """True while no request is being worked on, so that nothing is lost by closing."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Read bytes of a request at once, or in slices where they would hold up other connections."""
        if not self._left and slice_end(data) == len(data):
            self._read(data)
            return
        if not self._left:
            self.flow.held = self.flow.read_paused = True
            self.transport.pause_reading()
            start_task(self._read_slices(), name="slices", on_failure=lambda _: self.transport.abort())
        self._left += data

    async def _read_slices(self) -> None:
        """Read what has come, one slice of one connection between all else that the event loop does."""
        while self._left:
            await asyncio.sleep(0)
            async with self.slice_turn:
                end = slice_end(self._left)
                part, self._left = self._left[:end], self._left[end:]
                if part:
                    self._read(part)
            if self.transport.is_closing():
                self._left = b""
        self.flow.held = False
        self.flow.resume_reading()

    def _read(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self.slot.work()
        unread = self.conn.trailing_data[0]
        if self.conn.their_state is h11.DONE and len(unread) < MOST_AHEAD:
            self.flow.resume_reading()  # of requests that wait for their turn: else nobody hears that the client leaves
        elif self.conn.their_state is h11.IDLE and unread.count(b"\n") >= MOST_LINES:
            self._refuse(
                refused(431, f"Invalid HTTP request received: the header has more than {MOST_LINES} lines.", code="invalid_http")
            )
        if self.conn.their_state is h11.IDLE:
            self._due = min(self._due, self.loop.time() + HEAD_S)
        elif self.conn.their_state is h11.SEND_BODY and self.idle:
            self._due = min(self._due, self.loop.time() + LINGER_S)
        else:
            self._due = math.inf

    def on_response_complete(self) -> None:
        """Start the clock for the rest of the request, or for what has come of the next one."""
        self._due = math.inf
        self.slot.rest()
        super().on_response_complete()
        if not self.idle:  # the next request had come already
            self.slot.work()
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
            self._refuse(refused(408, f"The request's header did not arrive within {HEAD_S:g}s.", code="request_timeout"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Answer what is not HTTP in the shape of all errors. Called by uvicorn while it handles h11's error."""
        reason = sys.exception()
        self._refuse(
            refused(
                getattr(reason, "error_status_hint", 400),
                f"{msg.rstrip('.')}: {reason}" if reason is not None else msg,
                code="invalid_http",
            )
        )

    def _refuse(self, error: RequestError) -> None:
        """Answer in place of the application, if nothing of its answer is out yet, and close."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # what the application still says is not sent
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            response = error_response(error)
            headers = [*response.raw_headers, (b"connection", b"close")]
            for event in (
                h11.Response(status_code=error.status, headers=headers, reason=STATUS_PHRASES.get(error.status, b"")),
                h11.Data(data=bytes(response.body)),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def refusing(error: RequestError) -> ASGIApp:
    """Return an ASGI application that answers every request with `error` and closes the connection."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = error_response(error, scope)
        response.headers["connection"] = "close"
        await response(scope, receive, send)

    return app
