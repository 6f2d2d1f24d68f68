"""Takes connections from the listening socket, and no more of them than there is room for.

asyncio's own server knows no limits, and when descriptors run out it logs a traceback for each connection that waits.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import socket
import ssl
from collections import Counter
from collections.abc import Callable, Iterable

from tandem.borders import start_task
from tandem.errors import OverloadedError, RequestError, UnavailableError
from tandem.log import Seldom
from tandem.server.connections import connection
from tandem.server.connections.connection import Connection, refusing
from tandem.server.limits.quotas import group_of

logger = logging.getLogger(__name__)

SHORTAGE = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
PAUSE_S = 0.25
"""Seconds without accepting when descriptors have run out."""
BATCH = 64
"""Most connections that are taken, or idle ones that are closed, at once."""
YOUNG_S = 1.0
"""Seconds for which a connection without a request is about to bring one."""
SHARE = 32
"""Where all places are taken, one part in so many is made free at once: a look for idle connections takes time for each
that there is, and a flood must not bring one look for each new one."""
AGAIN_S = 1e-5
"""Seconds for each that there is until they are looked through again after none of them was idle."""
REFUSED = 64
"""Connections beyond the limit that are told why; more are closed without a word."""
RESERVE = 128
"""Descriptors that are not for clients: engines' sockets, the journal, the model's files."""


def most_connections(asked: int | None) -> int:
    """Most connections at once: `asked`, but no more than this process may have descriptors for."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    room = max(limit - RESERVE, limit // 2) if limit != resource.RLIM_INFINITY else 2**20
    return min(asked, room) if asked is not None else room


class Acceptor:
    """Accepts on one listening socket. Belongs to the event loop that called `start`."""

    def __init__(self, listener: socket.socket, make: Callable[[], Connection], *, most: int, most_each: int,
                 tls: Callable[[], ssl.SSLContext | None], clients: Callable[[], Iterable[Connection]]) -> None:
        """`make` makes a connection; at most `most` at once, `most_each` of one address. `clients` gives those
        there are.

        `tls` gives the certificate of the moment, or None for plain HTTP.
        """
        self._listener = listener
        self._make = make
        self._most, self._most_each = most, most_each
        self._tls = tls
        self._clients = clients
        self._open: Counter[str] = Counter()
        self._leaving: Counter[str] = Counter()
        """Connections that were closed to make room, and are about to give back their places."""
        self._none_idle: dict[str | None, float] = {}
        """Times until which no idle connection is looked for, among all (None) or those of an address."""
        self._shaking: dict[asyncio.Task[bool], tuple[str, float]] = {}
        """TLS handshakes under way: whose, and since when; the oldest first."""
        self._resume: asyncio.TimerHandle | None = None
        self._seldom = Seldom(logger)

    def start(self) -> None:
        """Begin to accept."""
        self._loop = asyncio.get_running_loop()
        self._listener.setblocking(False)
        self._loop.add_reader(self._listener.fileno(), self._accept)

    def stop(self) -> None:
        """Accept no more."""
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self._listener.fileno())

    @property
    def count(self) -> int:
        """Connections that are open, those in a TLS handshake included."""
        return self._open.total()

    def _accept(self) -> None:
        for _ in range(BATCH):
            try:
                client, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._short(error)
                return
            self._admit(client, group_of(str(address[0])))

    def _short(self, error: OSError) -> None:
        """No descriptor is left: wait a little, and close whatever stands idle meanwhile."""
        closed = self._make_room(BATCH, before=self._loop.time() - YOUNG_S)
        remedy = ("a higher `ulimit -n` before the start gives more room" if error.errno in SHORTAGE
                  else "this is not expected")
        self._seldom.warning("a connection cannot be accepted (%s; %d are open): %d idle ones are closed and new ones "
                             "wait; %s", error.strerror, self.count, closed, remedy)
        self._loop.remove_reader(self._listener.fileno())
        self._resume = self._loop.call_later(PAUSE_S, self.start)

    def _make_room(self, most: int, *, group: str | None = None, before: float = math.inf) -> int:
        """Close up to `most` connections that have had no request since `before`, those of longest standing first; only
        those of `group`, if one is given. Returns how many were closed."""
        idle = [one for one in self._clients() if one.idle and one.since < before and not one.transport.is_closing()
                and group in (None, one.group)]
        idle.sort(key=lambda one: one.since)
        for one in idle[:most]:
            one.transport.close()
            self._leaving[one.group] += 1
        slow = [task for task, (whose, since) in self._shaking.items() if since < before and group in (None, whose)]
        for task in slow[:most - len(idle[:most])]:
            task.cancel()
            self._leaving[self._shaking.pop(task)[0]] += 1
        return min(len(idle) + len(slow), most)

    def _has_room(self, most: int, group: str | None = None) -> bool:
        """Fewer than `most` are open (of `group`, if one is given), or will be as soon as idle ones are closed."""
        opened, leaving = ((self.count, self._leaving.total()) if group is None
                           else (self._open[group], self._leaving[group]))
        now = self._loop.time()
        if opened - leaving < most:
            return True
        if now < self._none_idle.get(group, 0.0):
            return False
        if self._make_room(max(most // SHARE, 1), group=group):
            return True
        self._none_idle = {whose: until for whose, until in self._none_idle.items() if until > now}
        self._none_idle[group] = now + AGAIN_S * self.count
        return False

    def _gone(self, group: str) -> None:
        """A place was given back."""
        self._leaving[group] -= 1
        if self._leaving[group] <= 0:
            del self._leaving[group]

    def _admit(self, client: socket.socket, group: str) -> None:
        refusal: RequestError | None = None
        if self._open[group] >= self._most_each:
            if not self._has_room(self._most_each, group):
                refusal = OverloadedError(f"This address has {self._open[group]} connections with requests under way "
                                          "(--max-connections-per-address).", code="too_many_connections")
        elif self.count >= self._most and not self._has_room(self._most):
            refusal = UnavailableError("The server has as many connections as it takes (--max-connections); try again "
                                       "later.", code="too_many_connections")
        if (self.count - self._leaving.total() >= self._most + REFUSED
                or self._open[group] - self._leaving[group] >= self._most_each + REFUSED):
            client.close()
            return
        place = _Counted(self._open, group, self._gone)
        connecting = start_task(self._connect(client, place, refusal), name="connection", on_failure=lambda _: None)
        self._shaking[connecting] = (group, self._loop.time())
        connecting.add_done_callback(lambda task: self._connected(task, client, place))

    def _connected(self, task: asyncio.Task[bool], client: socket.socket, place: _Counted) -> None:
        """The handshake is over, or was ended, perhaps before it had begun."""
        self._shaking.pop(task, None)
        if task.cancelled() or task.exception() is not None or not task.result():
            client.close()
            place.give_back()

    async def _connect(self, client: socket.socket, place: _Counted, refusal: RequestError | None) -> bool:
        """Hand the socket to a protocol, after the TLS handshake if there is one; False when that fails."""
        def make() -> Connection:
            made = self._make()
            made.on_lost, made.group = place.give_back, place.group
            if refusal is not None:
                made.app = refusing(refusal)
            return made

        tls = self._tls()
        client.setblocking(False)
        try:
            await self._loop.connect_accepted_socket(
                make, client, ssl=tls, ssl_handshake_timeout=connection.HEAD_S if tls is not None else None)
        except OSError as error:  # not TLS, or gone
            logger.debug("a connection ended at once: %s", error)
            return False
        return True


class _Counted:
    """One connection among those of its group, counted until it is given back."""

    def __init__(self, taken: Counter[str], group: str, gone: Callable[[str], None]) -> None:
        self.group, self._gone = group, gone
        self._taken: Counter[str] | None = taken
        taken[group] += 1

    def give_back(self) -> None:
        """Safe to call again."""
        taken, self._taken = self._taken, None
        if taken is not None:
            taken[self.group] -= 1
            if not taken[self.group]:
                del taken[self.group]
            self._gone(self.group)
