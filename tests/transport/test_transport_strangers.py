"""Who does not belong: at the bus and at the join socket strangers are refused, logged once, and disturb nobody."""

from __future__ import annotations

import logging
import os
import resource
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec
import psutil
import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from tandem.errors import TransportError
from tandem.protocol import keys as protocol_keys
from tandem.protocol.control import Failure
from tandem.protocol.hosts import HostPing, Leave
from tandem.protocol.keys import ClusterKeys
from tandem.transport import guard
from tandem.transport.bus import EngineBus, HeadEnd, HostEnd, RankBus, rank_identity

FAILURE = Failure(0, "RankFailure", "message", "trace")
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + bytes(32)
"""ZMTP 3.1: signature, version, mechanism, as-server, filler."""


@dataclass
class Door:
    """A bound socket of the cluster, whichever it is."""

    name: str
    keys: ClusterKeys
    port: int
    member: Callable[[int], Any]
    """A member that connects to this port."""
    heard: Callable[[], object]
    """What has come in, None if nothing has for half a second."""
    close: Callable[[], None]

    def heard_soon(self) -> object:
        """The first thing that comes."""
        while (got := self.heard()) is None:
            continue
        return got

    def works(self) -> bool:
        """A member gets through."""
        one = self.member(self.port)
        one.send(FAILURE if self.name == "bus" else Leave())
        got = self.heard_soon()
        one.close()
        return got is not None


def bus_door(keys: ClusterKeys) -> Door:
    bus = EngineBus(keys)
    return Door(
        "bus",
        keys,
        int(bus.endpoint.rpartition(":")[2]),
        lambda port: RankBus(f"tcp://127.0.0.1:{port}", keys, 0, "g"),
        lambda: bus.receive(0.5),
        bus.close,
    )


def join_door(keys: ClusterKeys) -> Door:
    head = HeadEnd(keys, "127.0.0.1")

    def heard() -> object:
        head.socket.poll(500)
        return head.receive()

    return Door("join socket", keys, head.port, lambda port: HostEnd(f"tcp://127.0.0.1:{port}", keys, "host"), heard, head.close)


@pytest.fixture
def keys() -> ClusterKeys:
    return ClusterKeys.generate()


@pytest.fixture(params=[bus_door, join_door], ids=["bus", "join"])
def door(request: pytest.FixtureRequest, keys: ClusterKeys) -> Iterator[Door]:
    one = request.param(keys)
    yield one
    one.close()


def dealer(context: zmq.Context[zmq.Socket[bytes]], port: int, keys: ClusterKeys | None) -> zmq.Socket[bytes]:
    one = context.socket(zmq.DEALER)
    one.linger = 0
    one.reconnect_ivl = 50
    one.identity = rank_identity(0, "g")
    if keys is not None:
        keys.secure_connect(one)
    one.connect(f"tcp://127.0.0.1:{port}")
    return one


def refusals(caplog: pytest.LogCaptureFixture, door: Door, wait_s: float = 240.0) -> int:
    """Lines about refused peers, once there is one."""
    deadline = time.monotonic() + wait_s
    words = f"refused a peer at the {door.name} "
    while not any(words in record.message for record in caplog.records) and time.monotonic() < deadline:
        time.sleep(0.02)
    return sum(words in record.message for record in caplog.records)


@pytest.mark.parametrize("stranger", ["no keys", "other keys", "the door's public key alone"])
def test_a_peer_without_the_keys_is_refused_and_logged_once(door: Door, caplog: pytest.LogCaptureFixture, stranger: str) -> None:
    other = ClusterKeys.generate()
    theirs = {"no keys": None, "other keys": other}.get(
        stranger, msgspec.structs.replace(other, bind_public=door.keys.bind_public)
    )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with caplog.at_level(logging.WARNING, logger="tandem"):
        intruders = [dealer(context, door.port, theirs) for _ in range(3)]
        for one in intruders:
            one.send(msgspec.msgpack.encode(FAILURE))
        assert door.heard() is None  # several attempts by each, meanwhile
        assert refusals(caplog, door) == 1
        assert door.works()
    context.destroy()


def test_garbage_on_the_port_is_refused_and_logged_once(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="tandem"):
        for junk in (b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" + b"\xff" * 5000, bytes(10_000), GREETING + b"\xff" * 500):
            with socket.create_connection(("127.0.0.1", door.port)) as raw:
                raw.sendall(junk)
                assert door.works()
        assert refusals(caplog, door) == 1


def test_a_huge_frame_is_announced_in_vain(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """One gigabyte announced by a stranger: the connection ends, and no memory is set aside for it."""
    before = psutil.Process().memory_info().rss
    with (
        caplog.at_level(logging.WARNING, logger="tandem"),
        socket.create_connection(("127.0.0.1", door.port), timeout=240) as raw,
    ):
        raw.sendall(GREETING)
        raw.sendall(b"\x06" + struct.pack(">Q", 2**30) + bytes(1000))  # a long command frame
        while raw.recv(4096):
            pass
        assert refusals(caplog, door) == 1
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert door.works()


def test_a_stranger_who_is_gone_before_it_is_looked_at_is_logged_too(
    door: Door, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def late(monitor: zmq.Socket[bytes]) -> Any:
        event = recv_monitor_message(monitor)
        time.sleep(0.3)
        return event

    monkeypatch.setattr(guard, "recv_monitor_message", late)
    with caplog.at_level(logging.WARNING, logger="tandem"):
        with socket.create_connection(("127.0.0.1", door.port)) as raw:
            raw.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert refusals(caplog, door) == 1
    assert door.works()


def test_a_huge_frame_of_a_member_ends_its_connection_alone(door: Door) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    member = dealer(context, door.port, door.keys)
    member.send(bytes(300 * 2**20))
    assert door.heard() is None
    context.destroy()
    assert door.works()


@pytest.fixture
def strangers() -> Iterator[Callable[..., list[socket.socket]]]:
    """Opens connections to a port, from 127.0.0.`host`, that say nothing."""
    with ExitStack() as stack:

        def open_some(port: int, count: int, host: int = 1) -> list[socket.socket]:
            ends = ("127.0.0.1", port), 240, (f"127.0.0.{host}", 0)
            return [stack.enter_context(socket.create_connection(*ends)) for _ in range(count)]

        yield open_some


def all_but(kept: int, opened: list[socket.socket]) -> list[socket.socket]:
    """Wait until no more than `kept` are open; those that are closed."""
    closed: list[socket.socket] = []
    while len(opened) - len(closed) > kept:
        readable, _, _ = select.select([one for one in opened if one not in closed], [], [], 240)
        assert readable, "they stay"
        for one in readable:
            if not one.recv(4096):
                closed.append(one)
    return closed


@pytest.mark.skipif(sys.platform == "darwin", reason="other loopback addresses need an alias there")
def test_connections_without_a_key_are_bounded_for_each_address_and_in_all(
    keys: ClusterKeys,
    strangers: Callable[..., list[socket.socket]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(guard, "MOST", 8)
    with closing(join_door(keys)) as door:
        opened = strangers(door.port, 12, 2)
        with caplog.at_level(logging.WARNING, logger="tandem"):
            closed = all_but(2, opened)
            assert set(closed) == set(opened[2:]), "the first of an address stay"
            assert door.works()
        assert sum("too many connections at the join socket" in one.message for one in caplog.records) == 1
        opened = [one for one in opened if one not in closed]
        for host in range(3, 8):
            opened += strangers(door.port, 2, host)
        all_but(8, opened)
        assert door.works()


def test_a_connection_that_never_shows_a_key_is_closed(
    keys: ClusterKeys, strangers: Callable[..., list[socket.socket]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol_keys, "HANDSHAKE_S", 0.2)
    with closing(join_door(keys)) as door:
        all_but(0, strangers(door.port, 3))
        assert door.works()


def test_without_descriptors_connections_are_closed_instead_of_tried_again_and_again(keys: ClusterKeys) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with closing(join_door(keys)) as door, ExitStack() as stack:
        clients = [stack.enter_context(socket.socket()) for _ in range(5)]
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/dev/fd"))) + 8, limit[1]))
        with suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        for client in clients:
            client.settimeout(240)
            client.connect(("127.0.0.1", door.port))
        all_but(0, clients)
        stack.close()
        assert door.works()


class Recorder:
    """Passes a member's connection on to a door and keeps the bytes that the member sent."""

    def __init__(self, port: int) -> None:
        self.sent = bytearray()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._target = port
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(("127.0.0.1", self._target))
        back = threading.Thread(target=self._copy, args=(far, near, bytearray()), daemon=True)
        back.start()
        self._copy(near, far, self.sent)
        back.join(240)
        near.close()
        far.close()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, kept: bytearray) -> None:
        try:
            while data := source.recv(65536):
                kept += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return  # the other side has closed

    def close(self) -> None:
        self._listener.close()


def test_a_replayed_hello_is_refused(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder(door.port)
    member = door.member(recorder.port)
    member.send(FAILURE if door.name == "bus" else Leave())
    assert door.heard_soon() is not None
    member.close()
    time.sleep(0.2)
    assert len(recorder.sent) > 300  # greeting, handshake and the message
    with caplog.at_level(logging.WARNING, logger="tandem"):
        with socket.create_connection(("127.0.0.1", door.port)) as raw:
            raw.sendall(recorder.sent)
            assert door.heard() is None
        assert refusals(caplog, door) == 1
    assert door.works()
    recorder.close()


def test_a_member_that_connects_again_is_heard_though_its_old_connection_has_not_ended(door: Door) -> None:
    with closing(door.member(door.port)) as old:
        old.send(FAILURE if door.name == "bus" else Leave())
        assert door.heard_soon() is not None
        assert door.works()


def test_bytes_of_a_member_that_are_no_message_of_its_kind(door: Door) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    member = dealer(context, door.port, door.keys)
    member.send(msgspec.msgpack.encode(HostPing(1)))  # a head's word, not a host's or a rank's
    with pytest.raises(TransportError):
        door.heard_soon()
    context.destroy()
    assert door.works()
