"""The join socket: one end for the head, one for each rank host; msgpack structs over CURVE-secured TCP."""

from __future__ import annotations

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.errors import TransportError
from tandem.protocol.codec import Decoder
from tandem.protocol.hosts import HeadMessage, HostMessage
from tandem.protocol.keys import ClusterKeys
from tandem.transport.errors import translated
from tandem.transport.security import MemberSocket

MAX_FRAME = 4 * 1024 * 1024
"""Bytes."""
SILENT = "nothing answers there"
"""Trouble of which no more is known."""

_encoder = msgspec.msgpack.Encoder()


class HeadEnd(MemberSocket):
    """The head's end. Rank hosts are known by the identity that they connect with."""

    def __init__(self, keys: ClusterKeys, host: str, port: int = 0) -> None:
        """Bind to an address of this machine (`0.0.0.0` for all), and a port (0 takes a free one). Raises
        TransportError."""
        super().__init__(zmq.ROUTER, keys, MAX_FRAME, linger_ms=500)
        self.socket.router_mandatory = True
        self.socket.router_handover = True  # to who connects again before the old connection has ended
        self._listen(host, port, name="join socket")
        self._decoder = Decoder[HostMessage](HostMessage)

    def send(self, identity: bytes, message: HeadMessage) -> None:
        """Send to one rank host. Raises TransportError when it is not connected."""
        with translated("the rank host is not connected"):
            self.socket.send_multipart([identity, _encoder.encode(message)], zmq.DONTWAIT)

    def receive(self) -> tuple[bytes, HostMessage] | None:
        """Next (identity, message); None when there is none. Raises TransportError for bytes that are no message."""
        try:
            frames = self.socket.recv_multipart(zmq.DONTWAIT)
        except zmq.Again:
            return None
        if len(frames) != 2:
            raise TransportError(f"message of {len(frames)} frames, expected 2")
        return frames[0], self._decoder.decode(frames[1])


class HostEnd(MemberSocket):
    """A rank host's end: connected to one address of the head."""

    def __init__(self, endpoint: str, keys: ClusterKeys, identity: str) -> None:
        super().__init__(zmq.DEALER, keys, MAX_FRAME, linger_ms=500)
        self.socket.identity = identity.encode("ascii")
        self.socket.reconnect_ivl = 200
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        self._connect(endpoint)
        self._decoder = Decoder[HeadMessage](HeadMessage)
        self._connected = self._refused = False

    @property
    def trouble(self) -> str:
        """What stands in the way, if the head does not answer."""
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._connected = True
            self._refused = event not in (zmq.EVENT_CONNECTED, zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if self._refused:
            return "refused: the token is not that of this head"
        return "connected, but no answer" if self._connected else SILENT

    def send(self, message: HostMessage) -> None:
        """Queue a message; it is dropped when the head has not taken any for long."""
        try:
            self.socket.send(_encoder.encode(message), zmq.DONTWAIT)
        except zmq.Again:
            return

    def receive(self, timeout_s: float) -> HeadMessage | None:
        """Next message; None when `timeout_s` seconds pass. Raises TransportError for bytes that are no message."""
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        return self._decoder.decode(self.socket.recv())

    def close(self, *, flush: bool = True) -> None:
        """Close; with `flush` what is queued gets half a second."""
        if not flush:
            self.socket.linger = 0
        self.socket.disable_monitor()
        self._monitor.close()
        super().close()
