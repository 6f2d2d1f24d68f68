"""The supervisor between a nonsensical client and a nonsensical engine."""

from __future__ import annotations

import random
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from statuses import STATUS
from tandem.errors import UsageError
from tandem.protocol.supervisor_messages import ControlRefused, ListReplicas, ReplicaList, SupervisorReply
from tandem.supervision.control_socket import ControlServer, ask
from tandem.supervision.status_probe import StatusProbe


@pytest.fixture
def path() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp") as directory:
        yield Path(directory) / "c.sock"


def nonsense() -> Iterator[list[bytes]]:
    draw = random.Random(0)
    good = msgspec.msgpack.encode(ListReplicas())
    yield from ([b""], [b"", b""], [good, good], [good[:3]], [b"\x91" * 50_000], [b"\x81\xa4type\xa4None"])
    for _ in range(40):
        yield [draw.randbytes(draw.randrange(40)) + b"\xc1" for _ in range(draw.randint(1, 3))]


def test_the_control_socket_refuses_and_goes_on(path: Path) -> None:
    server = ControlServer(path, lambda request: ReplicaList([]))
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            server.serve(0.05)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with zmq.Context() as context, context.socket(zmq.REQ) as client:
            client.linger = 0
            client.connect(f"ipc://{path}")
            for frames in nonsense():
                client.send_multipart(frames)
                assert client.poll(240_000)
                assert isinstance(msgspec.msgpack.decode(client.recv(), type=SupervisorReply), ControlRefused)
        assert ask(path, ListReplicas()) == ReplicaList([])
    finally:
        stop.set()
        thread.join()
        server.close()


def test_an_answer_that_cannot_be_read_is_the_users_to_know(path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.REP) as server:
        server.linger = 500
        server.bind(f"ipc://{path}")
        thread = threading.Thread(target=lambda: (server.recv(), server.send(b"\x91" * 9999)))
        thread.start()
        with pytest.raises(UsageError, match="cannot be read"):
            ask(path, ListReplicas())
        thread.join()


def test_the_probe_of_an_engine(path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as engine:
        engine.linger = 0
        engine.bind(f"ipc://{path}")
        probe = StatusProbe(f"ipc://{path}")
        assert probe.ask(0.5) is None
        assert engine.poll(240_000)
        identity, _ = engine.recv_multipart()
        for frames in nonsense():
            engine.send_multipart([identity, *frames])
        engine.send_multipart([identity, msgspec.msgpack.encode(STATUS)])
        assert probe.ask(240.0) == STATUS
        probe.close()
