"""CURVE keys shared by the processes of one cluster run."""

from __future__ import annotations

import zmq
from msgspec import Struct

DOMAIN = "tandem"
HANDSHAKE_S = 10.0
"""Seconds for a peer's CURVE handshake; ZeroMQ then closes the connection."""


class ClusterKeys(Struct, frozen=True):
    """Two CURVE25519 key pairs in Z85: one for binding sockets, one for connecting sockets.

    Generated for each cluster run. The launcher passes them to ranks, never in process arguments.
    """

    bind_public: str
    bind_secret: str
    connect_public: str
    connect_secret: str

    @classmethod
    def generate(cls) -> ClusterKeys:
        """Generate two new key pairs."""
        bind_public, bind_secret = zmq.curve_keypair()
        connect_public, connect_secret = zmq.curve_keypair()
        return cls(bind_public.decode(), bind_secret.decode(), connect_public.decode(), connect_secret.decode())

    def secure_bind(self, socket: zmq.Socket[bytes]) -> None:
        """Require the cluster's keys on `socket`; call before bind. Its context needs an `Authenticator`."""
        socket.handshake_ivl = int(HANDSHAKE_S * 1000)
        socket.curve_server = True
        socket.curve_publickey = self.bind_public.encode()
        socket.curve_secretkey = self.bind_secret.encode()
        socket.zap_domain = DOMAIN.encode()

    def secure_connect(self, socket: zmq.Socket[bytes]) -> None:
        """Present the cluster's keys on `socket`; call before connect."""
        socket.curve_serverkey = self.bind_public.encode()
        socket.curve_publickey = self.connect_public.encode()
        socket.curve_secretkey = self.connect_secret.encode()
