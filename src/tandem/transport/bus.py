"""The control bus: one engine end, one end for each rank; msgpack structs over CURVE-secured TCP."""

from __future__ import annotations

import msgspec
import zmq

from tandem.errors import TransportError
from tandem.protocol.codec import Decoder
from tandem.protocol.control import RankCommand, RankMessage
from tandem.protocol.keys import ClusterKeys
from tandem.transport.errors import translated
from tandem.transport.security import MemberSocket

MAX_FRAME = 256 * 1024 * 1024
"""Bytes."""

_encoder = msgspec.msgpack.Encoder()


class EngineBus(MemberSocket):
    """The engine's end. Ranks are known by the identity `rank:generation` that they connect with."""

    def __init__(self, keys: ClusterKeys, host: str = "127.0.0.1") -> None:
        super().__init__(zmq.ROUTER, keys, MAX_FRAME)
        self.socket.router_mandatory = True
        self.socket.router_handover = True  # to who connects again before the old connection has ended
        self._listen(host, name="bus")
        self._decoder = Decoder[RankMessage](RankMessage)

    def send(self, rank: int, generation: str, command: RankCommand) -> None:
        """Send to one rank. Raises TransportError when that rank is not connected."""
        with translated(f"rank {rank} is not connected to the bus"):
            self.socket.send_multipart([rank_identity(rank, generation), _encoder.encode(command)])

    def receive(self, timeout_s: float) -> tuple[str, RankMessage] | None:
        """Next message as (sender's identity, message), or None when `timeout_s` seconds pass.

        Raises TransportError for bytes that are no message of a rank.
        """
        if not self.socket.poll(int(timeout_s * 1000)):
            return None
        frames = self.socket.recv_multipart()
        if len(frames) != 2:
            raise TransportError(f"bus message of {len(frames)} frames, expected 2")
        try:
            return frames[0].decode("ascii"), self._decoder.decode(frames[1])
        except UnicodeDecodeError as error:
            raise TransportError(f"a bus peer's name cannot be read: {error}") from None


class RankBus(MemberSocket):
    """A rank's end."""

    def __init__(self, endpoint: str, keys: ClusterKeys, rank: int, generation: str) -> None:
        super().__init__(zmq.DEALER, keys, MAX_FRAME, linger_ms=1000)
        self.socket.identity = rank_identity(rank, generation)
        self._connect(endpoint)
        self._decoder = Decoder[RankCommand](RankCommand)

    def send(self, message: RankMessage) -> None:
        """Send to the engine; never blocks for long."""
        self.socket.send(_encoder.encode(message))

    def wait(self, other: object) -> None:
        """Sleep until a command is there, or the socket `other` is readable."""
        poller = zmq.Poller()
        poller.register(self.socket, zmq.POLLIN)
        poller.register(other, zmq.POLLIN)
        poller.poll()

    def receive(self, timeout_s: float | None = None) -> RankCommand | None:
        """Next command; None when `timeout_s` seconds pass. Without a timeout it sleeps until one comes.

        Raises TransportError for bytes that are no command.
        """
        if timeout_s is not None and not self.socket.poll(int(timeout_s * 1000)):
            return None
        return self._decoder.decode(self.socket.recv())


def rank_identity(rank: int, generation: str) -> bytes:
    """ZeroMQ identity of a rank; the generation keeps leftovers of a former gang out."""
    return f"{rank}:{generation}".encode("ascii")
