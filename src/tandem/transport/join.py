"""The join socket: one end for the head, one for each rank host; msgpack structs over CURVE-secured TCP."""

from __future__ import annotations

import os

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.errors import TransportError
from tandem.protocol.codec import Decoder
from tandem.protocol.hosts import HeadMessage, HostMessage
from tandem.protocol.keys import ClusterKeys
from tandem.transport.errors import translated
from tandem.transport.security import Authenticator

MAX_FRAME = 4 * 1024 * 1024
"""Bytes; a longer frame ends the peer's connection before it is read into memory."""

SILENT = "nothing answers there"
"""Trouble of which no more is known."""

_encoder = msgspec.msgpack.Encoder()


class HeadEnd:
    """The head's end. Rank hosts are known by the identity that they connect with."""

    def __init__(self, keys: ClusterKeys, host: str, port: int = 0) -> None:
        """Bind to an address of this machine (`0.0.0.0` for all), and a port (0 takes a free one). Raises OSError."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator = Authenticator(self._context, keys)
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.linger = 500
        self.socket.maxmsgsize = MAX_FRAME
        self.socket.router_mandatory = True
        self.socket.router_handover = True  # to who connects again before the old connection has ended
        keys.secure_bind(self.socket)
        try:
            self.socket.bind(f"tcp://{host}:{port or '*'}")
        except zmq.ZMQError as error:
            self.close()
            code = error.errno or 0
            raise OSError(code, os.strerror(code)) from error
        self.port = int(self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._authenticator.watch(self.socket, "join socket")
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

    def close(self) -> None:
        """Close the socket; what is not sent gets half a second."""
        self._authenticator.stop()
        self.socket.close()
        self._context.term()


class HostEnd:
    """A rank host's end: connected to one address of the head."""

    def __init__(self, endpoint: str, keys: ClusterKeys, identity: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 500
        self.socket.maxmsgsize = MAX_FRAME
        self.socket.identity = identity.encode("ascii")
        self.socket.reconnect_ivl = 200
        keys.secure_connect(self.socket)
        self._monitor = self.socket.get_monitor_socket(
            zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
            | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
        self.socket.connect(endpoint)
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
        self.socket.close()
        self._context.term()
