"""A client of the engine's socket that sends nonsense: it is dropped, and the next one is served."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import msgspec
import zmq

from statuses import STATUS
from tandem.engine.ipc_server import IPCServer
from tandem.protocol.control import Abort, EngineMessage, EngineStatus, QueryStatus, Submit
from tandem.protocol.request import EngineRequest, SamplingParams


def test_the_gateway_survives_its_clients() -> None:
    draw = random.Random(0)
    submit = msgspec.msgpack.encode(Submit(EngineRequest(request_id="r", prompt=[1], params=SamplingParams())))
    query = msgspec.msgpack.encode(QueryStatus(7))
    with tempfile.TemporaryDirectory(prefix="tandem-", dir="/tmp") as directory:
        ipc_server = IPCServer(Path(directory) / "e.sock", STATUS, lambda: b"")
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.connect(f"ipc://{ipc_server.path}")
            for _ in range(200):
                cut = draw.randrange(len(submit))
                damaged = bytearray(submit)
                damaged[cut] = draw.randrange(256)
                for frames in (
                    [b""],
                    [submit[:cut]],
                    [submit[:cut], submit[cut:]],
                    [query, b""],
                    [b"\x91" * 50_000],
                    [draw.randbytes(draw.randrange(60)) + b"\xc1"],
                    [bytes(damaged)],
                ):
                    client.send_multipart(frames)
            client.send(msgspec.msgpack.encode(Abort("last")))
            client.send(query)
            taken = []
            while not taken or taken[-1] != Abort("last"):
                messages = ipc_server.receive(10.0)
                assert messages, "the gateway has stopped handing on messages"
                taken += [message for _, message in messages]
            assert all(isinstance(message, Submit | Abort) for message in taken)
            assert client.poll(240_000)
            answer = msgspec.msgpack.decode(client.recv(), type=EngineMessage)
            assert isinstance(answer, EngineStatus) and (answer.query_id, answer.state) == (7, "ready")
        ipc_server.close()
