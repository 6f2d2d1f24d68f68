"""Members of a cluster that send nonsense: the receiving end says so and goes on with the next message."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
import zmq

from tandem.errors import TandemError, TransportError
from tandem.protocol.blob_messages import ListFiles, Range, ReadRange
from tandem.protocol.control import Failure, Stop
from tandem.protocol.keys import ClusterKeys
from tandem.transport.blobs import BlobClient, BlobServer
from tandem.transport.bus import EngineBus, RankBus, rank_identity
from tandem.transport.channel import FrameHeader, TcpChannel
from tandem.transport.security import Authenticator

HEADER = FrameHeader(1, "float32", (2, 2))
GOOD = msgspec.msgpack.encode(HEADER)


def nonsense(good: bytes, count: int = 60) -> Iterator[list[bytes]]:
    """Messages of one to three frames, none of which is right; the same ones each time."""
    draw = random.Random(0)
    yield from ([b""], [b"", b""], [good], [good, b"", b""], [b"\x91" * 30_000], [b"\x91" * 30_000, b"x"],
                [b"\xdd\xff\xff\xff\xff", b"x"], [msgspec.msgpack.encode({"type": "Nothing"})],
                [msgspec.msgpack.encode({"type": "Hello", "rank": "zero"})])  # fmt: skip
    for _ in range(count):
        yield [draw.randbytes(draw.randrange(80)) + b"\xc1" for _ in range(draw.randint(1, 3))]


@contextmanager
def member(keys: ClusterKeys, kind: int, endpoint: str, identity: bytes = b"") -> Iterator[zmq.Socket[bytes]]:
    """A socket that holds the cluster's keys."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 2000
        if identity:
            socket.identity = identity
        keys.secure_connect(socket)
        socket.connect(endpoint)
        yield socket


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.generate()


def test_the_engines_end_of_the_bus(keys: ClusterKeys) -> None:
    bus, failure = EngineBus(keys), Failure(0, "E", "m")
    with member(keys, zmq.DEALER, bus.endpoint, b"0:\xff") as odd:
        odd.send(msgspec.msgpack.encode(failure))
        assert bus.receive(240.0) == (b"0:\xff", failure)  # whose it is the engine compares, and drops it
    with member(keys, zmq.DEALER, bus.endpoint, rank_identity(0, "g")) as rank:
        bad = list(nonsense(b"\xc1"))
        for frames in bad:
            rank.send_multipart(frames)
        rank.send(msgspec.msgpack.encode(failure))
        for _ in bad:
            with pytest.raises(TransportError):
                bus.receive(240.0)
        assert bus.receive(240.0) == (b"0:g", failure)
    bus.close()


def test_a_ranks_end_of_the_bus(keys: ClusterKeys) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Authenticator(context, keys)
    engine = context.socket(zmq.ROUTER)
    keys.secure_bind(engine)
    port = engine.bind_to_random_port("tcp://127.0.0.1")
    rank = RankBus(f"tcp://127.0.0.1:{port}", keys, 0, "g")
    rank.send(Failure(0, "E", "m"))
    assert engine.poll(240_000)
    identity, _ = engine.recv_multipart()
    bad = [frame for frames in nonsense(b"\xc1") for frame in frames]
    for frame in bad:
        engine.send_multipart([identity, frame])
    engine.send_multipart([identity, msgspec.msgpack.encode(Stop())])
    for _ in bad:
        with pytest.raises(TransportError):
            rank.receive(240.0)
    assert rank.receive(240.0) == Stop()
    rank.close()
    engine.close(linger=0)
    guard.stop()
    context.term()


def test_the_channel(keys: ClusterKeys) -> None:
    channel = TcpChannel(keys)
    with member(keys, zmq.PUSH, channel.endpoint) as peer:
        for frames in (*nonsense(GOOD), [GOOD, b"too short"], [GOOD, b"too long" * 9]):
            peer.send_multipart(frames)
            with pytest.raises(TandemError):  # TransportError, or BatchDesync for bytes that are another header
                channel.receive(HEADER)
        peer.send_multipart([GOOD, b"0123456789abcdef"])
        assert bytes(channel.receive(HEADER)) == b"0123456789abcdef"
    channel.close()


def test_the_server_of_files(keys: ClusterKeys, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(range(256)))
    server = BlobServer([path], keys)
    ranges = [("../secret", 0, 1), (path.name, -1, 4), (path.name, 0, -1), (path.name, 2**62, 2**62), (path.name, 0, 0),
              ("\0", 0, 1), (path.name, 250, 100), (path.name, 0, 2**40)]  # fmt: skip
    with member(keys, zmq.DEALER, server.endpoint) as peer:
        for frames in nonsense(msgspec.msgpack.encode(ListFiles(1)) + b"\xc1"):
            peer.send_multipart(frames)
        for number, wanted in enumerate(ranges):
            peer.send(msgspec.msgpack.encode(ReadRange(number, Range(*wanted))))
            assert peer.poll(240_000)
            assert b"Refusal" in peer.recv(), wanted
    client = BlobClient(server.endpoint, keys, patience_s=240)
    assert [file.name for file in client.files()] == [path.name]
    [(_, data, _)] = client.read([Range(path.name, 10, 20)])
    assert bytes(data) == bytes(range(10, 30))
    client.close()
    server.close()


def test_the_client_of_files(keys: ClusterKeys) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    guard = Authenticator(context, keys)
    head = context.socket(zmq.ROUTER)
    keys.secure_bind(head)
    port = head.bind_to_random_port("tcp://127.0.0.1")
    bad = list(nonsense(b"\xc1", 20))

    def answer() -> None:
        for frames in bad:
            assert head.poll(240_000)
            head.send_multipart([head.recv_multipart()[0], *frames])

    thread = threading.Thread(target=answer)
    thread.start()
    client = BlobClient(f"tcp://127.0.0.1:{port}", keys, patience_s=240)
    for _ in bad:
        with pytest.raises(TransportError):
            client.files()
    thread.join()
    client.close()
    head.close(linger=0)
    guard.stop()
    context.term()
