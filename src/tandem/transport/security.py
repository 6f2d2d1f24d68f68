"""CURVE keys of one cluster run: who holds them is a member, who does not is refused in the handshake."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tandem.protocol.keys import DOMAIN, ClusterKeys
from tandem.transport.guard import Guard


class Authenticator:
    """Lets into a context's bound sockets only peers that hold the cluster's connect key (RFC 27/ZAP)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys) -> None:
        self._key = keys.connect_public.encode()
        self._thread = ThreadAuthenticator(context)
        self._thread.start()
        self._thread.configure_curve_callback(domain=DOMAIN, credentials_provider=self)
        self._guards: list[Guard] = []

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq for each handshake with the peer's public key."""
        return key == self._key

    def watch(self, socket: zmq.Socket[bytes], name: str) -> None:
        """Bound the connections of `socket`, which is bound, and log refused peers; messages call it `name`."""
        self._guards.append(Guard(socket, name))

    def stop(self) -> None:
        """End the threads. Call before the sockets are closed."""
        for guard in self._guards:
            guard.stop()
        self._guards.clear()
        self._thread.stop()
