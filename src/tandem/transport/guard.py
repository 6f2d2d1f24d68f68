"""Limits on unauthenticated connections to a bound ZeroMQ socket: any host can open some, and ZeroMQ has no limit.

The socket's monitor reports the descriptor of each connection. Excess connections are shut down; ZeroMQ then closes them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import time
from collections import Counter

import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.crash_guard import start_thread
from tandem.log import Seldom
from tandem.protocol.keys import HANDSHAKE_S

log = logging.getLogger(__name__)
seldom = Seldom(log)

MOST = 128
"""Most simultaneous connections without a completed handshake, a quarter of it per address. Lower where the limit of open
descriptors is low."""
LOOK_MS = 1000
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)


class Guard:
    """Connection limiter of one bound socket; runs in its own thread until `stop`."""

    def __init__(self, bound: zmq.Socket[bytes], name: str, *, keyless_s: float | None = None) -> None:
        """Start watching `bound`, called `name` in messages.

        Without `keyless_s`, a connection counts until its handshake proves a key (`HANDSHAKE_S`). For sockets without keys,
        `keyless_s` is the most seconds a connection may last.
        """
        self._bound, self._name, self._keyless_s = bound, name, keyless_s
        self._endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(self._endpoint.rpartition(":")[2])
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST if soft == resource.RLIM_INFINITY else max(min(MOST, soft // 8), 4)
        self._strangers: dict[int, tuple[str, float]] = {}
        """(address, monotonic time) of each unauthenticated connection by descriptor, oldest first."""
        self._spare_fd: int | None = os.open(os.devnull, os.O_RDONLY)
        """Reserve descriptor, released when accept fails for lack of descriptors: the waiting connection is then accepted
        and closed. Otherwise ZeroMQ would retry in a busy loop."""
        self._monitor = bound.get_monitor_socket(_EVENTS)
        self._thread = start_thread(self._run, name="guard", on_failure=lambda _: None)  # the socket also works without the guard

    def stop(self) -> None:
        """End the thread. Call before closing the socket."""
        with contextlib.suppress(zmq.ZMQError):
            self._bound.disable_monitor()
        self._thread.join()
        if self._spare_fd is not None:
            os.close(self._spare_fd)

    def _run(self) -> None:
        while True:
            if self._monitor.poll(LOOK_MS):
                event = recv_monitor_message(self._monitor)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    break
                self._take(event["event"], int(event["value"]))
            self._forget_old(time.monotonic())
        self._monitor.close()

    def _take(self, event: int, number: int) -> None:
        """Handle a monitor event; `number` is the descriptor, or errno for a failed accept.

        ZeroMQ does not report which connection completed its handshake: the youngest is assumed.
        """
        if event == zmq.EVENT_ACCEPTED:
            self._admit(number)
        elif event == zmq.EVENT_ACCEPT_FAILED:
            seldom.warning(
                "a connection cannot be accepted at the %s: %s; it is closed; a higher `ulimit -n` before "
                "the start gives more room",
                self._name,
                os.strerror(number),
            )
            if self._spare_fd is not None:
                os.close(self._spare_fd)
                self._spare_fd = None
        elif event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            if self._keyless_s is None and self._strangers:
                self._strangers.popitem()
        elif self._strangers.pop(number, None) and self._keyless_s is None:
            seldom.log(
                logging.WARNING,
                "refused a peer at the %s %s: it does not hold this cluster's keys; nothing else is affected",
                self._name,
                self._endpoint,
                kind=self._endpoint,
            )
        if self._spare_fd is None and event != zmq.EVENT_ACCEPT_FAILED:
            with contextlib.suppress(OSError):  # still no free descriptor
                self._spare_fd = os.open(os.devnull, os.O_RDONLY)

    def _admit(self, number: int) -> None:
        """Count a new connection and enforce the limits.

        Close it when its address exceeds a quarter of the limit. When the total exceeds the limit, close the oldest
        connection of the address that has the most. Connections that have already ended do not count.
        """
        address = self._peer(number)
        if self._spare_fd is None:
            self._peer(number, shut=True)
            return
        self._strangers[number] = (address or "", time.monotonic())
        counts = Counter(address for address, _ in self._strangers.values() if address)
        if address and counts[address] > max(self._most // 4, 1):
            self._shut(number)
        elif sum(counts.values()) > self._most:
            [(fullest, _)] = counts.most_common(1)
            self._shut(next(other for other, (whose, _) in self._strangers.items() if whose == fullest))

    def _shut(self, number: int) -> None:
        address, _ = self._strangers.pop(number)
        self._peer(number, shut=True)
        seldom.log(
            logging.WARNING,
            "too many connections at the %s, most of them from %s; those without a key are closed, and nobody else is disturbed",
            self._name,
            address,
            kind=self._name,
        )

    def _forget_old(self, now: float) -> None:
        """Stop counting connections older than the handshake limit: ZeroMQ has closed or authenticated them. Close them
        when `keyless_s` applies."""
        while self._strangers:
            number, (_, since) = next(iter(self._strangers.items()))
            if now - since <= (self._keyless_s or 2 * HANDSHAKE_S):
                return
            del self._strangers[number]
            if self._keyless_s is not None:
                self._peer(number, shut=True)

    def _peer(self, number: int, *, shut: bool = False) -> str | None:
        """Return the peer address of a descriptor; with `shut`, also shut the connection down.

        Return None when the connection has ended or the descriptor belongs to another socket.
        """
        try:
            connection = socket.socket(fileno=number)
        except OSError:
            return None
        try:
            if connection.getsockname()[1] != self._port:
                return None
            address = str(connection.getpeername()[0])
            if shut:
                connection.shutdown(socket.SHUT_RDWR)
        except (OSError, IndexError):
            return None
        finally:
            connection.detach()
        return address
