"""CURVE keys of one cluster run: who holds them is a member, who does not is refused in the handshake."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from tandem.borders import start_thread
from tandem.protocol.keys import DOMAIN, ClusterKeys

log = logging.getLogger(__name__)

REFUSALS_S = 600.0
"""Seconds for which further refused peers of a socket are not logged."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED


class Authenticator:
    """Lets into a context's bound sockets only peers that hold the cluster's connect key (RFC 27/ZAP)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys) -> None:
        self._key = keys.connect_public.encode()
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._watched: list[tuple[zmq.Socket[bytes], threading.Thread]] = []

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq for each handshake with the peer's public key."""
        return key == self._key

    def watch(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Log when a peer is refused at `socket`, a bound one, in whose messages it is called `name`."""
        monitor = socket.get_monitor_socket(_EVENTS)
        endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        thread = start_thread(lambda: _log_refusals(monitor, name, endpoint), name="refusals",
                              on_failure=lambda _: None)  # it only writes to the log
        self._watched.append((socket, thread))

    def stop(self) -> None:
        """End the threads. Call before the sockets are closed."""
        for socket, thread in self._watched:
            with contextlib.suppress(zmq.ZMQError):
                socket.disable_monitor()
            thread.join()
        self._watched.clear()
        self._thread.stop()


def _log_refusals(monitor: zmq.Socket[bytes], name: str, endpoint: str) -> None:
    """Log peers that go without a handshake. A scanner may knock a thousand times: the first is a warning, those soon
    after are not.

    ZeroMQ does not say whose handshake it is that succeeded; the youngest connection's is the best guess.
    """
    quiet_until, strangers = 0.0, []
    while (event := recv_monitor_message(monitor))["event"] != zmq.EVENT_MONITOR_STOPPED:
        if event["event"] == zmq.EVENT_ACCEPTED:
            strangers.append(int(event["value"]))
        elif event["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            strangers = strangers[:-1]
        elif int(event["value"]) in strangers:
            strangers.remove(int(event["value"]))
            if time.monotonic() >= quiet_until:
                quiet_until = time.monotonic() + REFUSALS_S
                log.warning("refused a peer at the %s %s: it does not hold this cluster's keys; it is not let in, and "
                            "disturbs nobody (others are not logged for a while)", name, endpoint)
    monitor.close()
