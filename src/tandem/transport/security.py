"""CURVE keys of one cluster run: who holds them is a member, who does not is refused in the handshake."""

from __future__ import annotations

import zmq
from msgspec import Struct
from zmq.auth.thread import ThreadAuthenticator

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

    def callback(self, domain: str, key: bytes) -> bool:
        """Called by pyzmq for each handshake with the peer's public key."""
        return key == self._key

    def stop(self) -> None:
        """End the thread."""
        self._thread.stop()
