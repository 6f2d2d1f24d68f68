"""One client's connection: uvicorn's h11 protocol with time limits for sending and reading.

Otherwise a client could hold a file descriptor for ever: by sending nothing or half a header, by never finishing a body,
or by not reading its answer. Each limit counts from the start of its phase, so single bytes do not extend it.
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
"""Time limit, in seconds, for a request's header, from its first byte or from the connection's start."""
LINGER_S = 5.0
"""Time limit, in seconds, for the rest of a body after its request was answered."""
STALL_S = 120.0
"""Seconds after which a client that reads nothing of its answer is disconnected."""

MOST_AHEAD = 4096
"""Most bytes of pipelined requests to buffer while a request is served."""
MOST_HEADER = 64 * 1024
"""Most bytes of a request's header, including the request line."""
MOST_LINES = 256
"""Most lines to parse at once (some milliseconds), and most lines of a header."""
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#@]+)(?P<rest>(?:[/?][^#]*)?)", re.IGNORECASE)
"""Request target in absolute form (RFC 9112, section 3.2.2)."""


def slice_end(data: bytes) -> int:
    """Return how many bytes of `data` to parse at once: at most `MOST_LINES` lines.

    Parsing a body of one-byte chunks costs a thousand times what sending costs; one read of it could block all other
    connections for seconds.
    """
    if data.count(b"\n") <= MOST_LINES:
        return len(data)
    end = 0
    for _ in range(MOST_LINES):
        end = data.index(b"\n", end) + 1
    return end


class _Requests(h11.Connection):
    """h11 connection with header checks that h11 leaves to its user."""

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return h11's next event. Raises h11.RemoteProtocolError."""
        before = len(self.trailing_data[0]) if self.their_state is h11.IDLE else 0
        event = super().next_event()
        if not isinstance(event, h11.Request):
            return event
        if before - len(self.trailing_data[0]) > MOST_HEADER:  # h11 limits only incomplete headers
            raise h11.RemoteProtocolError(f"the header has more than {MOST_HEADER} bytes", error_status_hint=431)
        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in event.headers}:
            raise h11.RemoteProtocolError("send Content-Length or Transfer-Encoding, not both (RFC 9112, section 6.1)")
        return _in_origin_form(event)


def _in_origin_form(request: h11.Request) -> h11.Request:
    """Return the request with its target in origin form; the host of an absolute target replaces the Host header.

    RFC 9112, section 3.2.2. Raises h11.RemoteProtocolError for an invalid target.
    """
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
    """uvicorn's flow control, with a flag that prevents resuming."""

    held = False

    def resume_reading(self) -> None:
        """Resume reading, unless `held` is set."""
        if not self.held:
            super().resume_reading()


class Connection(H11Protocol):
    """uvicorn's protocol with time limits. Call `look` periodically; `slot` tracks whether it is idle, busy or closed."""

    slice_turn: asyncio.Lock
    """Lock held while a slice is parsed; shared by all connections of the event loop."""
    slot: ConnectionSlot
    flow: _Flow

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the parser and start the time limit of the first header."""
        super().connection_made(transport)
        self.slot.close = transport.close
        self.flow = _Flow(transport)
        self.conn = _Requests(h11.SERVER, MOST_HEADER)
        self._left = b""
        """Received bytes not parsed yet."""
        self._due = self.loop.time() + HEAD_S
        self._unread = (0, 0.0)
        """Bytes in the write buffer, and the event loop time since which their number is unchanged."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Release the connection's slot."""
        self._left = b""
        super().connection_lost(exc)
        self.slot.leave()

    @property
    def idle(self) -> bool:
        """True while no request is in progress, so that closing loses nothing."""
        return self.cycle is None or self.cycle.response_complete

    def data_received(self, data: bytes) -> None:
        """Parse received bytes at once, or in slices if they would block other connections."""
        if not self._left and slice_end(data) == len(data):
            self._read(data)
            return
        if not self._left:
            self.flow.held = self.flow.read_paused = True
            self.transport.pause_reading()
            start_task(self._read_slices(), name="slices", on_failure=lambda _: self.transport.abort())
        self._left += data

    async def _read_slices(self) -> None:
        """Parse the received bytes in slices, yielding to the event loop between them."""
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
            self.flow.resume_reading()  # read ahead: a paused transport does not report a disconnect
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
        """Start the time limit for the rest of the request's body, or for the next request's header."""
        self._due = math.inf
        self.slot.rest()
        super().on_response_complete()
        if not self.idle:  # the next request had arrived already
            self.slot.work()
        if self.conn.their_state is h11.SEND_BODY:
            self._due = self.loop.time() + LINGER_S
        elif self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._due = self.loop.time() + HEAD_S

    def look(self, now: float) -> None:
        """Close the connection if a time limit has passed at `now` (event loop time)."""
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
        """Answer invalid HTTP with our error envelope. uvicorn calls this while it handles h11's exception."""
        reason = sys.exception()
        self._refuse(
            refused(
                getattr(reason, "error_status_hint", 400),
                f"{msg.rstrip('.')}: {reason}" if reason is not None else msg,
                code="invalid_http",
            )
        )

    def _refuse(self, error: RequestError) -> None:
        """Send `error`, unless a response has begun, and close the connection."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # drops further output of the application
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
