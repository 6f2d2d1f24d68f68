"""The keys that the processes of one cluster run share."""

from __future__ import annotations

import zmq
from msgspec import Struct

DOMAIN = "tandem"
HANDSHAKE_S = 10.0
"""Seconds for a peer to show its key; ZeroMQ then closes the connection."""


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
        socket.handshake_ivl = int(HANDSHAKE_S * 1000)
        socket.curve_server = True
        socket.curve_publickey = self.bind_public.encode()
        socket.curve_secretkey = self.bind_secret.encode()
        socket.zap_domain = DOMAIN.encode()

    def secure_connect(self, socket: zmq.Socket[bytes]) -> None:
        """Make `socket` present the cluster's keys; call before connect."""
        socket.curve_serverkey = self.bind_public.encode()
        socket.curve_publickey = self.connect_public.encode()
        socket.curve_secretkey = self.connect_secret.encode()
