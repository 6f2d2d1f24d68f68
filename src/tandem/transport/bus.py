"""Message sockets between one hub and many peers: engine and ranks (the bus), head and node agents (the join socket).

msgpack structs over CURVE-secured TCP.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Generic, TypeVar

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.errors import TransportError
from tandem.protocol.codec import Decoder, encode
from tandem.protocol.control import RankCommand, RankMessage
from tandem.protocol.hosts import HeadMessage, HostMessage
from tandem.protocol.keys import ClusterKeys
from tandem.transport.mailbox import Mailbox
from tandem.transport.security import Admits, MemberSocket, translated

MAX_BUS_FRAME, MAX_JOIN_FRAME = 256 * 1024 * 1024, 4 * 1024 * 1024
"""Largest message in bytes, on the bus and on the join socket."""
SILENT = "nothing answers there"
"""Value of `HostEnd.trouble` when no connection exists and no cause is known."""

Sent = TypeVar("Sent")
Received = TypeVar("Received")


class HubSocket(MemberSocket, Generic[Sent, Received]):
    """Listening end (ROUTER). Peers are addressed by the ZeroMQ identity they connect with."""

    def __init__(
        self,
        received: object,
        keys: ClusterKeys | None,
        host: str,
        port: int | None,
        *,
        name: str,
        max_frame: int,
        linger_ms: int = 0,
        most_queued: int = 1000,
        admits: Admits | None = None,
        keyless_s: float | None = None,
    ) -> None:
        """Listen on `host` (an address of this machine, or `0.0.0.0`) at `port`, or a free port for None.

        `received` is the message type `Received` as a runtime value. `name` is the socket's name in messages. At most
        `most_queued` messages wait for each peer; 0 means unlimited. `admits` and `keyless_s` as in `_listen`. Raises
        TransportError.
        """
        super().__init__(zmq.ROUTER, keys, max_frame, linger_ms)
        self.socket.sndhwm = most_queued
        self.socket.router_mandatory = True
        self.socket.router_handover = True  # accept a peer that reconnects before its old connection has ended
        self._listen(host, port, name=name, admits=admits, keyless_s=keyless_s)
        self._decoder = Decoder[Received](received)
        self._outbox = Mailbox[tuple[bytes, Sent]]()

    def send(self, identity: bytes, message: Sent) -> None:
        """Send a message to one peer without blocking. Raises TransportError when the peer is not connected."""
        with translated("is not connected"):
            self.socket.send_multipart([identity, encode(message)], zmq.DONTWAIT)

    def receive(self, timeout_s: float = 0.0) -> tuple[bytes, Received] | None:
        """Return the next message as (sender's identity, message), or None after `timeout_s` seconds.

        Raises TransportError for a malformed message.
        """
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        identity, *frames = self.socket.recv_multipart()
        if len(frames) != 1:
            raise TransportError(f"message of {len(frames) + 1} frames, expected 2")
        return identity, self._decoder.decode(frames[0])

    def post(self, identity: bytes, message: Sent) -> None:
        """Queue a message for the socket's thread to send in its next `wait`. Thread-safe."""
        self._outbox.put((identity, message))

    def wait(self, timeout_s: float, *others: MemberSocket) -> None:
        """Sleep until this socket or one of `others` is readable, or a message is posted; then send posted messages.

        Sleep at most `timeout_s` seconds. Messages to disconnected peers are dropped: health checks detect such peers.
        """
        poller = zmq.Poller()
        for source in (self.socket, self._outbox.socket, *(other.socket for other in others)):
            poller.register(source, zmq.POLLIN)
        poller.poll(int(timeout_s * 1000))
        for identity, message in self._outbox.take():
            with suppress(TransportError):
                self.send(identity, message)

    def close(self) -> None:
        """Close the socket; unsent messages have `linger_ms` to leave."""
        super().close()
        self._outbox.close()


class SpokeSocket(MemberSocket, Generic[Sent, Received]):
    """Connecting end (DEALER) of a `HubSocket`."""

    def __init__(
        self, received: object, keys: ClusterKeys | None, identity: bytes, *, max_frame: int, linger_ms: int, drops: bool = False
    ) -> None:
        """Create the socket; a subclass calls `_connect`. `received` is the message type `Received` as a runtime value.

        With `drops`, a full send queue drops new messages instead of blocking.
        """
        super().__init__(zmq.DEALER, keys, max_frame, linger_ms)
        self.socket.identity = identity
        self._flags = zmq.DONTWAIT if drops else 0
        self._decoder = Decoder[Received](received)

    def send(self, message: Sent) -> None:
        """Queue a message. A full queue blocks, or drops the message if the socket was created with `drops`."""
        with suppress(zmq.Again):
            self.socket.send(encode(message), self._flags)

    def receive(self, timeout_s: float) -> Received | None:
        """Return the next message, or None after `timeout_s` seconds.

        Raises TransportError for a malformed message.
        """
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return self._decoder.decode(self.socket.recv())


class EngineBus(HubSocket[RankCommand | msgspec.Raw, RankMessage]):
    """The engine's end of the bus."""

    def __init__(self, keys: ClusterKeys, host: str = "127.0.0.1") -> None:
        super().__init__(RankMessage, keys, host, None, name="bus", max_frame=MAX_BUS_FRAME, most_queued=0)


class RankBus(SpokeSocket[RankMessage, RankCommand]):
    """A rank's end of the bus."""

    def __init__(self, endpoint: str, keys: ClusterKeys, rank: int, generation: str) -> None:
        super().__init__(RankCommand, keys, rank_identity(rank, generation), max_frame=MAX_BUS_FRAME, linger_ms=1000)
        self._connect(endpoint)

    def wait(self, other: object) -> None:
        """Block until a command has arrived or the socket `other` is readable."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(other, zmq.POLLIN)
        poller.poll()


def rank_identity(rank: int, generation: str) -> bytes:
    """Return the ZeroMQ identity of a rank. `generation` distinguishes it from ranks of an earlier rank group."""
    return f"{rank}:{generation}".encode("ascii")


class HeadEnd(HubSocket[HeadMessage, HostMessage]):
    """The head's end of the join socket."""

    def __init__(self, keys: ClusterKeys, host: str, port: int | None = None) -> None:
        super().__init__(HostMessage, keys, host, port, name="join socket", max_frame=MAX_JOIN_FRAME, linger_ms=500)


class HostEnd(SpokeSocket[HostMessage, HeadMessage]):
    """A node agent's end of the join socket, connected to one address of the head."""

    def __init__(self, endpoint: str, keys: ClusterKeys, identity: str) -> None:
        super().__init__(HeadMessage, keys, identity.encode("ascii"), max_frame=MAX_JOIN_FRAME, linger_ms=500, drops=True)
        self.socket.reconnect_ivl = 200
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED
            | zmq.EVENT_HANDSHAKE_SUCCEEDED
            | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
            | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        )
        self._connect(endpoint)
        self._connected = self._refused = False

    @property
    def trouble(self) -> str:
        """Reason why the head does not answer, as far as ZeroMQ's monitor reports one."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._connected = True
            self._refused = event not in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if self._refused:
            return "refused: the token is not that of this head"
        return "connected, but no answer" if self._connected else SILENT

    def close(self, *, flush: bool = True) -> None:
        """Close the socket. With `flush`, queued messages have half a second to leave; else they are dropped."""
        if not flush:
            self.socket.linger = 0
        self.socket.disable_monitor()
        self._monitor.close()
        super().close()
