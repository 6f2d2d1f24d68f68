"""The pipeline channel: stage i hands frames to stage i + 1, the last stage hands tokens to stage 0.

Every stage has one inbound and one outbound end, so the stages form a ring. A frame is a header (step, element type,
shape) and the raw bytes of an array. Frames arrive in the order in which they were sent; the receiver knows from the
plan what header must come next, to the byte, and stops when something else does.
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
"""Frames that may wait unsent; the sender then blocks, so a fast stage cannot fill the memory."""
MAX_FRAME = 1024 * 1024 * 1024
"""Bytes; a longer frame ends the peer's connection before it is read into memory."""
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int32": 4, "uint32": 4}
"""Bytes of the element types that stages exchange."""


class FrameHeader(Struct, frozen=True, array_like=True):
    """Description of the bytes behind it."""

    step_id: int
    dtype: str
    shape: tuple[int, ...]


Buffer = bytes | memoryview


class TcpChannel(MemberSocket):
    """Both ends of one stage: `send` to the next stage, `receive` from the one before.

    ZeroMQ PUSH/PULL over CURVE-secured TCP; sending runs in ZeroMQ's own thread, beside the computation.
    """

    def __init__(self, keys: ClusterKeys, host: str = "127.0.0.1", port: int | None = None) -> None:
        """Listen on `host`, at `port` or any free one. Raises TransportError when the port is taken."""
        super().__init__(zmq.PULL, keys, MAX_FRAME)
        self.socket.rcvhwm = FRAMES_IN_FLIGHT
        self._outbound: list[zmq.Socket[bytes]] | None = None
        self._listen(host, port)

    def connect(self, endpoints: list[str]) -> None:
        """Connect to each of `endpoints`, perhaps none; returns at once, frames wait until the peers are there."""
        self._outbound = []
        for endpoint in endpoints:
            socket = self._context.socket(zmq.PUSH)
            socket.linger, socket.sndhwm = 0, FRAMES_IN_FLIGHT
            self._connect(endpoint, socket)
            self._outbound.append(socket)

    def send(self, header: FrameHeader, data: Buffer) -> None:
        """Queue one frame for every peer; blocks only when `FRAMES_IN_FLIGHT` frames wait. `data` must not change
        afterwards."""
        if self._outbound is None:
            raise TransportError("the channel was used before it was connected")
        encoded = encode(header)
        for socket in self._outbound:
            socket.send(encoded, zmq.SNDMORE)
            socket.send(data, copy=False)

    def receive(self, expected: FrameHeader) -> Buffer:
        """Wait for the next frame.

        Raises BatchDesync when it is not the expected one, TransportError when it is none at all.
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
        """Close both ends; frames that are not sent yet are dropped."""
        for socket in self._outbound or ():
            socket.close()
        super().close()
