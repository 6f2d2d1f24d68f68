"""Bounds on the connections of a bound ZeroMQ socket, which anybody can open and ZeroMQ does not count.

The socket's monitor reports the descriptor of each connection. One too many is shut down; ZeroMQ then closes it.
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
"""Number of connections without a handshake at once; fewer where this process may have few descriptors. An address gets
a quarter of them."""
LOOK_MS = 1000
_EVENTS = (
    zmq.EVENT_ACCEPTED
    | zmq.EVENT_ACCEPT_FAILED
    | zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_MONITOR_STOPPED
)


class Guard:
    """Watches one bound socket from a thread of its own until `stop`."""

    def __init__(self, bound: zmq.Socket[bytes], name: str, *, keyless_s: float | None = None) -> None:
        """Messages call the socket `name`. Where anybody can complete a handshake, a connection may last `keyless_s`
        seconds; else one counts until its peer has shown a key, which ZeroMQ waits for (`HANDSHAKE_S`)."""
        self._bound, self._name, self._keyless_s = bound, name, keyless_s
        self._endpoint = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        self._port = int(self._endpoint.rpartition(":")[2])
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most = MOST if soft == resource.RLIM_INFINITY else max(min(MOST, soft // 8), 4)
        self._strangers: dict[int, tuple[str, float]] = {}
        """Address and time of each connection that counts, by descriptor, the oldest first."""
        self._spare_fd: int | None = os.open(os.devnull, os.O_RDONLY)
        """A descriptor for a connection that waits when there is no other: it is accepted and closed. ZeroMQ would
        try again without a pause."""
        self._monitor = bound.get_monitor_socket(_EVENTS)
        self._thread = start_thread(self._run, name="guard", on_failure=lambda _: None)  # the socket works without it

    def stop(self) -> None:
        """End the thread. Call before the socket is closed."""
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
        """Handle a monitor event of descriptor `number`. ZeroMQ does not report whose handshake succeeded: the youngest
        connection's is assumed."""
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
                "refused a peer at the %s %s: it does not hold this cluster's keys; it is not "
                "let in, and disturbs nobody (others are not logged for a while)",
                self._name,
                self._endpoint,
                kind=self._endpoint,
            )
        if self._spare_fd is None and event != zmq.EVENT_ACCEPT_FAILED:
            with contextlib.suppress(OSError):  # there is still none
                self._spare_fd = os.open(os.devnull, os.O_RDONLY)

    def _admit(self, number: int) -> None:
        """Count a connection. Above a quarter of the limit for its address it is closed; above the limit in all the
        address with the most loses its oldest. Ended ones are skipped."""
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
        """Connections that have lasted: ZeroMQ has closed them, or knows their keys; without keys their time is up."""
        while self._strangers:
            number, (_, since) = next(iter(self._strangers.items()))
            if now - since <= (self._keyless_s or 2 * HANDSHAKE_S):
                return
            del self._strangers[number]
            if self._keyless_s is not None:
                self._peer(number, shut=True)

    def _peer(self, number: int, *, shut: bool = False) -> str | None:
        """Return the address at the other end of a descriptor, and end the connection with `shut`. None where it is
        closed, and its number may be in other use."""
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
