"""Sockets between the processes of one cluster run, secured by CURVE keys: who holds them is a member, who does not is
refused in the handshake."""

from __future__ import annotations

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tandem.protocol.keys import DOMAIN, ClusterKeys
from tandem.transport.errors import translated
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


class MemberSocket:
    """A socket with a ZeroMQ context of its own, which either listens or connects."""

    def __init__(self, kind: int, keys: ClusterKeys, max_frame: int, linger_ms: int = 0) -> None:
        """A frame of more than `max_frame` bytes ends the peer's connection before it is read into memory."""
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: Authenticator | None = None
        self.socket = self._context.socket(kind)
        self.socket.linger, self.socket.maxmsgsize = linger_ms, max_frame

    def _listen(self, host: str, port: int | None = None, *, name: str = "") -> None:
        """Let members in at `port`, or any free one; with a `name`, which messages call it, connections are bounded.

        Raises TransportError, and closes.
        """
        self._authenticator = Authenticator(self._context, self._keys)
        self._keys.secure_bind(self.socket)
        with translated(f"{host}:{port or '*'} cannot be listened on", lambda: MemberSocket.close(self)):
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.endpoint = f"tcp://{host}:{self.port}"
        if name:
            self._authenticator.watch(self.socket, name)

    def _connect(self, endpoint: str) -> None:
        self._keys.secure_connect(self.socket)
        self.socket.connect(endpoint)

    def close(self) -> None:
        """Close the socket and its context; what is not sent gets as long as the socket lingers."""
        if self._authenticator is not None:
            self._authenticator.stop()
        self.socket.close()
        self._context.term()
