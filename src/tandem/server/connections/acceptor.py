"""Accept connections from the listening socket, up to a limit.

asyncio's own server has no limit, and logs a traceback per waiting connection when file descriptors run out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
import ssl
import time
from collections.abc import Callable

from tandem.crash_guard import start_task
from tandem.errors import OverloadedError, RequestError, UnavailableError
from tandem.log import Seldom
from tandem.server.connections import connection
from tandem.server.connections.connection import Connection, refusing
from tandem.server.connections.slots import ConnectionSlot, ConnectionSlots
from tandem.server.quotas import group_of

logger = logging.getLogger(__name__)

SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
PAUSE_S = 0.25
"""Seconds to pause accepting when file descriptors run out."""
BATCH = 64
"""Most connections to accept, or idle ones to close, per event loop callback."""
YOUNG_S = 1.0
"""Seconds for which a new idle connection is not closed, as its request may be on the way."""
REFUSED = 64
"""Connections beyond the limit that get an error response; further ones are closed at once."""
RESERVE = 128
"""File descriptors reserved for engines' sockets, the journal and the model's files."""


def most_connections(asked: int | None) -> int:
    """Return the connection limit: `asked` (None: no wish), capped by this process's file descriptor limit."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = max(limit - RESERVE, limit // 2) if limit != resource.RLIM_INFINITY else 2**20
    return min(asked, room) if asked is not None else room


class Acceptor:
    """Acceptor of one listening socket. Use only on the event loop that called `start`."""

    def __init__(
        self,
        listener: socket.socket,
        make: Callable[[], Connection],
        *,
        most: int,
        most_each: int,
        tls: Callable[[], ssl.SSLContext | None],
    ) -> None:
        """`make` creates the protocol of a connection; at most `most` are open, `most_each` per client group.

        `tls` returns the current SSL context, or None for plain HTTP.
        """
        self._listener = listener
        self._make = make
        self._most, self._most_each = most, most_each
        self._tls = tls
        self.slots = ConnectionSlots()
        self._resume: asyncio.TimerHandle | None = None
        self._seldom = Seldom(logger)

    def start(self) -> None:
        """Start accepting connections."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Stop accepting connections."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._pause(error)
                return
            self._admit(client, group_of(str(address[0])))

    def _pause(self, error: OSError) -> None:
        """Stop accepting for `PAUSE_S`, as no file descriptor is left, and close idle connections."""
        before = time.monotonic() - YOUNG_S
        opened = self.slots.open[None]
        closed = sum(self.slots.make_room(before=before) for _ in range(BATCH))
        remedy = "a higher `ulimit -n` before the start gives more room" if error.errno in SHORTAGE else "this is not expected"
        self._seldom.warning(
            "a connection cannot be accepted (%s; %d are open): %d idle ones are closed and new ones wait; %s",
            error.strerror,
            opened,
            closed,
            remedy,
        )
        self._loop.remove_reader(self._listener.fileno())
        self._resume = self._loop.call_later(PAUSE_S, self.start)

    def _admit(self, client: socket.socket, group: str) -> None:
        refusal: RequestError | None = None
        slots = self.slots
        if slots.open[group] >= self._most_each:
            if not slots.make_room(group):
                refusal = OverloadedError(
                    f"This address has {slots.open[group]} connections with requests under way (--max-connections-per-address).",
                    code="too_many_connections",
                )
        elif slots.open[None] >= self._most and not slots.make_room():
            refusal = UnavailableError(
                "The server has as many connections as it takes (--max-connections); try again later.",
                code="too_many_connections",
            )
        if slots.open[None] >= self._most + REFUSED or slots.open[group] >= self._most_each + REFUSED:
            client.close()
            return
        slot = ConnectionSlot(slots, group)
        connecting = start_task(self._connect(client, slot, refusal), name="connection", on_failure=lambda _: None)
        slot.close = connecting.cancel
        connecting.add_done_callback(lambda task: _connected(task, client, slot))

    async def _connect(self, client: socket.socket, slot: ConnectionSlot, refusal: RequestError | None) -> bool:
        """Do the TLS handshake, if any, and attach a protocol to the socket; return False if that fails.

        `refusal`: error with which every request on the connection is answered.
        """

        def make() -> Connection:
            made = self._make()
            made.slot = slot
            if refusal is not None:
                made.app = refusing(refusal)
            return made

        tls = self._tls()
        client.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                make, client, ssl=tls, ssl_handshake_timeout=connection.HEAD_S if tls is not None else None
            )
        except OSError as error:  # not TLS, or disconnected
            logger.debug("a connection ended at once: %s", error)
            return False
        return True


def _connected(task: asyncio.Task[bool], client: socket.socket, slot: ConnectionSlot) -> None:
    """Close the socket after a failed or cancelled handshake (a task callback)."""
    if task.cancelled() or task.exception() is not None or not task.result():
        client.close()
        slot.leave()
