"""The bus and the channel over real sockets: members get through, strangers and bad bytes do not."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import msgspec
import pytest
import zmq

from tandem.errors import BatchDesync, TransportError
from tandem.protocol.control import Failure, Hello, Ping, Stop
from tandem.protocol.keys import ClusterKeys
from tandem.transport.bus import EngineBus, RankBus, rank_identity
from tandem.transport.channel import FrameHeader, TcpChannel

FAILURE = Failure(0, "RankFailure", "message", "trace")


@pytest.fixture(scope="module")
def keys() -> ClusterKeys:
    return ClusterKeys.generate()


@pytest.fixture
def bus(keys: ClusterKeys) -> Iterator[EngineBus]:
    engine = EngineBus(keys)
    yield engine
    engine.close()


def dealer(context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ClusterKeys | None) -> zmq.Socket[bytes]:
    one = context.socket(zmq.DEALER)
    one.linger = 0
    one.identity = rank_identity(0, "g")
    if keys is not None:
        keys.secure_connect(one)
    one.connect(endpoint)
    return one


def test_messages_cross_in_both_directions(bus: EngineBus, keys: ClusterKeys) -> None:
    rank = RankBus(bus.endpoint, keys, 0, "g")
    rank.send(FAILURE)
    assert bus.receive(240.0) == (b"0:g", FAILURE)
    bus.send(rank_identity(0, "g"), Stop())
    assert rank.receive(240.0) == Stop()
    assert rank.receive(0.0) is None
    rank.close()


def test_sending_to_a_rank_that_is_not_there_is_an_error(bus: EngineBus) -> None:
    with pytest.raises(TransportError, match="not connected"):
        bus.send(rank_identity(3, "g"), Stop())


def test_a_burst_of_orders_waits_for_the_rank_that_takes_them(bus: EngineBus, keys: ClusterKeys) -> None:
    rank = RankBus(bus.endpoint, keys, 0, "g")
    rank.send(FAILURE)
    assert bus.receive(240.0)
    orders = [Ping(number) for number in range(20_000)]
    for order in orders:
        bus.send(rank_identity(0, "g"), order)
    assert [rank.receive(240.0) for _ in orders] == orders
    rank.close()


@pytest.mark.parametrize("stranger", ["no keys", "other keys", "server key only"])
def test_a_peer_without_the_clusters_keys_is_not_heard(bus: EngineBus, keys: ClusterKeys, stranger: str) -> None:
    other = ClusterKeys.generate()
    theirs = {"no keys": None, "other keys": other,
              "server key only": msgspec.structs.replace(other, bind_public=keys.bind_public)}[stranger]
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    intruder = dealer(context, bus.endpoint, theirs)
    intruder.send(msgspec.msgpack.encode(FAILURE))
    assert bus.receive(0.5) is None
    intruder.close()
    context.term()
    member = RankBus(bus.endpoint, keys, 1, "g")
    member.send(FAILURE)
    assert bus.receive(240.0) == (b"1:g", FAILURE)
    member.close()


def test_bytes_that_are_no_message_are_an_error_and_the_bus_goes_on(bus: EngineBus, keys: ClusterKeys) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    member = dealer(context, bus.endpoint, keys)
    for garbage in (b"", b"\xff" * 20, msgspec.msgpack.encode({"type": "Nothing"}),
                    msgspec.msgpack.encode({"type": "Hello", "rank": "zero"})):
        member.send(garbage)
        with pytest.raises(TransportError):
            bus.receive(240.0)
    member.send_multipart([b"one", b"two"])
    with pytest.raises(TransportError, match="frames"):
        bus.receive(240.0)
    hello = Hello(0, 1, "h", {}, "")
    member.send(msgspec.msgpack.encode(hello))
    assert bus.receive(240.0) == (b"0:g", hello)
    member.close()
    context.term()


def test_raw_tcp_garbage_does_not_disturb_the_bus(bus: EngineBus, keys: ClusterKeys) -> None:
    host, port = bus.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(b"GET / HTTP/1.1\r\n\r\n" + b"\xff" * 5000)
        member = RankBus(bus.endpoint, keys, 0, "g")
        member.send(FAILURE)
        assert bus.receive(240.0) == (b"0:g", FAILURE)
        member.close()


@pytest.fixture
def ring(keys: ClusterKeys) -> Iterator[list[TcpChannel]]:
    channels = [TcpChannel(keys) for _ in range(3)]
    for i, channel in enumerate(channels):
        channel.connect([channels[(i + 1) % 3].endpoint])
    yield channels
    for one in channels:
        one.close()


def test_frames_keep_order_and_content_around_the_ring(ring: list[TcpChannel]) -> None:
    for step in range(20):
        for channel in ring:
            channel.send(FrameHeader(step, "float32", (step, 2)), bytes([step]) * 8 * step)
    for step in range(20):
        for channel in ring:
            assert bytes(channel.receive(FrameHeader(step, "float32", (step, 2)))) == bytes([step]) * 8 * step


def test_a_frame_that_is_not_the_expected_one_stops_the_receiver(ring: list[TcpChannel]) -> None:
    ring[0].send(FrameHeader(4, "float32", (1,)), b"1234")
    with pytest.raises(BatchDesync, match="BATCH DESYNC DETECTED"):
        ring[1].receive(FrameHeader(5, "float32", (1,)))


def test_a_channel_must_be_connected_before_it_sends(keys: ClusterKeys) -> None:
    channel = TcpChannel(keys)
    with pytest.raises(TransportError):
        channel.send(FrameHeader(0, "float32", (1,)), b"1234")
    channel.close()


def test_one_sender_can_feed_several_peers(keys: ClusterKeys) -> None:
    source, *peers = [TcpChannel(keys) for _ in range(3)]
    source.connect([peer.endpoint for peer in peers])
    header = FrameHeader(1, "int32", (1,))
    source.send(header, b"1234")
    assert [bytes(peer.receive(header)) for peer in peers] == [b"1234", b"1234"]
    for channel in (source, *peers):
        channel.close()
