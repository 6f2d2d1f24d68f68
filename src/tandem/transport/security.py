"""Sockets between the processes of a cluster, secured by CURVE keys: the handshake refuses a peer without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tandem.errors import TransportError
from tandem.protocol.keys import DOMAIN, HANDSHAKE_S, ClusterKeys
from tandem.transport.guard import Guard

Admits = Callable[[str], bool]
"""Judges a peer's public CURVE key in Z85."""


@contextmanager
def translated(what: str, undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Call `undo` and raise TransportError, which begins with `what`, for whatever pyzmq raises: its exceptions have no
    useful base, and do not leave this package."""
    try:
        yield
    except (zmq.ZMQBaseError, NotImplementedError) as error:  # ZMQVersionError is of the second kind
        undo()
        raise TransportError(f"{what}: {error}") from error


class Authenticator(ThreadAuthenticator):
    """Admit to a context's bound sockets only peers whose CURVE key is accepted (RFC 27/ZAP)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys, admits: Admits | None = None) -> None:
        """Start at once, and run until `stop`, which comes before the sockets are closed. `admits` judges a peer's
        public key in Z85; without it only the cluster's connect key is accepted."""
        super().__init__(context)
        self._admits = admits or (lambda key: key == keys.connect_public)
        self.start()
        self.configure_curve_callback(domain=DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Judge the peer's public key; pyzmq calls it, in its own thread, for each handshake."""
        return self._admits(key.decode("ascii", errors="replace"))


class MemberSocket:
    """A socket with a ZeroMQ context of its own, which either listens or connects."""

    def __init__(self, kind: int, keys: ClusterKeys | None, max_frame: int, linger_ms: int = 0) -> None:
        """A frame of more than `max_frame` bytes ends the peer's connection before it is read into memory. Without
        `keys` anybody can connect."""
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: Authenticator | None = None
        self._guard: Guard | None = None
        self.socket = self._context.socket(kind)
        self.socket.linger, self.socket.maxmsgsize = linger_ms, max_frame

    def _listen(
        self, host: str, port: int | None = None, *, name: str = "", admits: Admits | None = None, keyless_s: float | None = None
    ) -> None:
        """Listen at `port`, or any free one; with a `name`, which messages call it, connections are bounded.

        `admits` as in `Authenticator`, `keyless_s` as in `Guard`. Raises TransportError, and closes.
        """
        if self._keys is not None:
            self._authenticator = Authenticator(self._context, self._keys, admits)
            self._keys.secure_bind(self.socket)
        else:
            self.socket.handshake_ivl = int(HANDSHAKE_S * 1000)
        with translated(f"{host}:{port or '*'} cannot be listened on", lambda: MemberSocket.close(self)):
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self.endpoint = f"tcp://{host}:{self.port}"
        if name:
            self._guard = Guard(self.socket, name, keyless_s=keyless_s)

    def _connect(self, endpoint: str, socket: zmq.Socket[bytes] | None = None) -> None:
        """Connect this socket, or another one of its context."""
        socket = self.socket if socket is None else socket
        if self._keys is not None:
            self._keys.secure_connect(socket)
        socket.connect(endpoint)

    def close(self) -> None:
        """Close the socket and its context; unsent messages get as long as the socket lingers."""
        for thread in (self._guard, self._authenticator):
            if thread is not None:
                thread.stop()
        self.socket.close()
        self._context.term()
