"""CURVE keys of one cluster run: who holds them is a member, who does not is refused in the handshake."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

import zmq
from msgspec import Struct
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

log = logging.getLogger(__name__)

REFUSALS_S = 600.0
"""Seconds for which further refused peers of a socket are not logged."""
_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED

DOMAIN = "tandem"


class ClusterKeys(Struct, frozen=True):
    """Two CURVE25519 key pairs in Z85: one for sockets that bind, one for sockets that connect.

    Made anew for each run of a cluster and handed to the ranks by the launcher, never in process arguments.
    """

    bind_public: str
    bind_secret: str
    connect_public: str
    connect_secret: str

    @classmethod
    def generate(cls) -> ClusterKeys:
        """Draw fresh keys."""
        bind_public, bind_secret = zmq.curve_keypair()
        connect_public, connect_secret = zmq.curve_keypair()
        return cls(bind_public.decode(), bind_secret.decode(), connect_public.decode(), connect_secret.decode())

    def secure_bind(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` demand the cluster's keys; call before bind. Needs an `Authenticator` in its context."""
        socket.curve_server = True
        socket.curve_publickey = self.bind_public.encode()
        socket.curve_secretkey = self.bind_secret.encode()
        socket.zap_domain = DOMAIN.encode()

    def secure_connect(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` present the cluster's keys; call before connect."""
        socket.curve_serverkey = self.bind_public.encode()
        socket.curve_publickey = self.connect_public.encode()
        socket.curve_secretkey = self.connect_secret.encode()


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
        thread = threading.Thread(target=_log_refusals, args=(monitor, name, endpoint), name="refusals", daemon=True)
        thread.start()
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
                log.warning("refused a peer at the %s %s: it does not hold this cluster's keys (others are not logged "
                            "for a while)", name, endpoint)
    monitor.close()
