"""The bus and the channel over real sockets, between members; strangers and bad bytes are in files of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.errors import BatchDesync, TransportError
from tandem.protocol.control import Failure, Ping, Stop
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
