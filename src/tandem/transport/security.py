"""Sockets between the processes of a cluster, secured by CURVE keys: the handshake rejects peers without them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq
from zmq.auth.thread import ThreadAuthenticator

from tandem.errors import TransportError
from tandem.protocol.keys import DOMAIN, HANDSHAKE_S, ClusterKeys
from tandem.transport.guard import Guard

Admits = Callable[[str], bool]
"""Predicate on a peer's public CURVE key in Z85: True admits the peer."""


@contextmanager
def translated(what: str, undo: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Turn pyzmq's exceptions into TransportError with the message `what: error`, after calling `undo`.

    pyzmq's exceptions have no common base class, and must not leave this package.
    """
    try:
        yield
    except (zmq.ZMQBaseError, NotImplementedError) as error:  # ZMQVersionError is a NotImplementedError
        undo()
        raise TransportError(f"{what}: {error}") from error


class Authenticator(ThreadAuthenticator):
    """ZAP authenticator (RFC 27) of a context: its bound sockets accept only peers whose CURVE key is admitted."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClusterKeys, admits: Admits | None = None) -> None:
        """Start at once; call `stop` before closing the sockets.

        `admits` judges a peer's public key in Z85; None admits only the cluster's connect key.
        """
        super().__init__(context)
        self._admits = admits or (lambda key: key == keys.connect_public)
        self.start()
        self.configure_curve_callback(domain=DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Return whether the peer's public key is admitted. pyzmq calls this in its own thread for each handshake."""
        return self._admits(key.decode("ascii", errors="replace"))


class MemberSocket:
    """A ZeroMQ socket with its own context, which either listens or connects."""

    def __init__(self, kind: int, keys: ClusterKeys | None, max_frame: int, linger_ms: int = 0) -> None:
        """Create a socket of the ZeroMQ type `kind`.

        A frame of more than `max_frame` bytes ends the peer's connection before the frame is read into memory. Without
        `keys` any peer can connect.
        """
        self._keys = keys
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: Authenticator | None = None
        self._guard: Guard | None = None
        self.socket = self._context.socket(kind)
        self.socket.linger, self.socket.maxmsgsize = linger_ms, max_frame

    def _listen(
        self, host: str, port: int | None = None, *, name: str = "", admits: Admits | None = None, keyless_s: float | None = None
    ) -> None:
        """Listen at `port`, or a free port for None. With a `name` (used in messages), a `Guard` limits connections.

        `admits` as in `Authenticator`, `keyless_s` as in `Guard`. On failure close the socket and raise TransportError.
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
        """Connect this socket, or `socket` of the same context, with the cluster's keys."""
        socket = self.socket if socket is None else socket
        if self._keys is not None:
            self._keys.secure_connect(socket)
        socket.connect(endpoint)

    def close(self) -> None:
        """Close the socket and its context; unsent messages have `linger_ms` to leave."""
        for thread in (self._guard, self._authenticator):
            if thread is not None:
                thread.stop()
        self.socket.close()
        self._context.term()
