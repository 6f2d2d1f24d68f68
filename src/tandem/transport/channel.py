"""The pipeline channel: stage i sends activations to stage i + 1, the last stage sends tokens to stage 0.

Each stage has one inbound and one outbound end, so the stages form a ring. A frame is a header (step, element type, shape)
and the raw bytes of an array. Frames arrive in sending order. The receiver derives the next header from the plan and stops
when the bytes of the received one differ.
"""

from __future__ import annotations

import math

import zmq
from msgspec import Struct

from tandem.errors import BatchDesync, TransportError
from tandem.protocol.codec import Decoder, encode
from tandem.protocol.keys import ClusterKeys
from tandem.transport.security import MemberSocket

FRAMES_IN_FLIGHT = 64
"""Number of unsent frames after which `send` blocks, so that a fast stage does not exhaust memory."""
MAX_FRAME = 1024 * 1024 * 1024
"""Bytes; a longer frame ends the peer's connection before it is read into memory."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint32": 4}
"""Bytes per element, by the element types that stages exchange."""


class FrameHeader(Struct, frozen=True, array_like=True):
    """Step, element type and shape of the array whose bytes follow."""

    step_id: int
    dtype: str
    shape: tuple[int, ...]


Buffer = bytes | memoryview


class TcpChannel(MemberSocket):
    """Both ends of one stage: `send` to the next stage, `receive` from the previous one.

    ZeroMQ PUSH/PULL over CURVE-secured TCP; ZeroMQ sends from its own thread, in parallel with the computation.
    """

    def __init__(self, keys: ClusterKeys, host: str = "127.0.0.1", port: int | None = None) -> None:
        """Listen on `host` at `port`, or a free port for None. Raises TransportError when the port is taken."""
        super().__init__(zmq.PULL, keys, MAX_FRAME)
        self.socket.rcvhwm = FRAMES_IN_FLIGHT
        self._outbound: list[zmq.Socket[bytes]] | None = None
        self._listen(host, port)

    def connect(self, endpoints: list[str]) -> None:
        """Connect to each of `endpoints` (may be empty) without blocking; frames are queued until the peers are reachable."""
        self._outbound = []
        for endpoint in endpoints:
            socket = self._context.socket(zmq.PUSH)
            socket.linger, socket.sndhwm = 0, FRAMES_IN_FLIGHT
            self._connect(endpoint, socket)
            self._outbound.append(socket)

    def send(self, header: FrameHeader, data: Buffer) -> None:
        """Queue one frame for every peer; block while `FRAMES_IN_FLIGHT` frames are unsent.

        The caller must not modify `data` afterwards. Raises TransportError before `connect`.
        """
        if self._outbound is None:
            raise TransportError("the channel was used before it was connected")
        encoded = encode(header)
        for socket in self._outbound:
            socket.send(encoded, zmq.SNDMORE)
            socket.send(data, copy=False)

    def receive(self, expected: FrameHeader) -> Buffer:
        """Wait without timeout for the next frame and return its data.

        Raises BatchDesync when its header is not `expected`, TransportError when it is malformed.
        """
        frames = self.socket.recv_multipart(copy=False)
        if len(frames) != 2:
            raise TransportError(f"channel message of {len(frames)} frames, expected 2")
        header, data = frames[0].buffer, frames[1].buffer
        if header != encode(expected):
            other = Decoder[FrameHeader](FrameHeader).decode(header)
            raise BatchDesync(f"BATCH DESYNC DETECTED: the channel brought {other}, the plan expects {expected}")
        size = ITEM_BYTES[expected.dtype] * math.prod(expected.shape)
        if len(data) != size:
            raise TransportError(f"the channel brought {len(data)} bytes for {expected}, which is {size}")
        return data

    def close(self) -> None:
        """Close both ends; unsent frames are dropped."""
        for socket in self._outbound or ():
            socket.close()
        super().close()
