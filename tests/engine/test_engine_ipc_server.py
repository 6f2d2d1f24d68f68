"""The engine's door: apis that go are noticed, and what they had asked is given up."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from served import wait_until
from statuses import STATUS
from tandem.engine import ipc_server as module
from tandem.engine.ipc_server import IPCServer
from tandem.errors import UsageError
from tandem.protocol.control import Abort, Detach, EngineMessage, EngineStatus, Output, QueryStatus


@pytest.fixture
def ipc_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[IPCServer]:
    monkeypatch.setattr(module, "DOUBT_S", 0.3)
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        one = IPCServer(Path(directory) / "engine.sock", STATUS, lambda: b"")
        yield one
        one.close()
        assert not one.path.exists()


def test_a_socket_file_that_was_removed_is_made_anew(ipc_server: IPCServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody's clean-up job did; those who are connected stay so, and another api can come."""
    monkeypatch.setattr("tandem.transport.socket_file.LOOK_S", 0.1)
    old = Api(ipc_server)
    old.say(QueryStatus(1))
    assert old.hear()
    ipc_server.path.unlink()
    wait_until(ipc_server.path.exists)
    for api in (old, Api(ipc_server)):
        api.say(QueryStatus(2))
        while (answer := api.hear()) and not (isinstance(answer, EngineStatus) and answer.query_id == 2):
            pass  # what an api is sent that has said nothing for a while
        api.die()
    assert ipc_server.path.stat().st_mode & 0o777 == 0o600


class Api:
    """A client that says what it is told to."""

    def __init__(self, ipc_server: IPCServer) -> None:
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(f"ipc://{ipc_server.path}")

    def say(self, message: Any) -> None:
        self.socket.send(msgspec.msgpack.encode(message))

    def hear(self) -> EngineMessage:
        assert self.socket.poll(240_000)
        message: EngineMessage = msgspec.msgpack.decode(self.socket.recv(), type=EngineMessage)
        return message

    def die(self) -> None:
        self.socket.close()
        self.context.term()


def next_message(ipc_server: IPCServer) -> Any:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if messages := ipc_server.receive(0.1):
            [message] = messages
            return message
    raise AssertionError("nothing came")


def test_an_api_that_dies_is_noticed_when_something_is_sent_to_it(ipc_server: IPCServer) -> None:
    api = Api(ipc_server)
    api.say(Abort("a"))
    client, _ = next_message(ipc_server)
    api.die()
    time.sleep(0.2)
    ipc_server.send(client, Output("a", [1]))
    assert next_message(ipc_server) == (client, Detach())


def test_an_api_that_dies_is_noticed_though_nothing_is_sent(ipc_server: IPCServer) -> None:
    api = Api(ipc_server)
    api.say(Abort("a"))
    client, _ = next_message(ipc_server)
    api.die()
    assert next_message(ipc_server) == (client, Detach())


def test_an_api_that_says_nothing_for_a_while_but_lives_is_kept(ipc_server: IPCServer) -> None:
    api = Api(ipc_server)
    api.say(Abort("a"))
    next_message(ipc_server)
    time.sleep(1.5)  # those that are dead are noticed after one
    assert ipc_server.receive(0.0) == []
    api.die()


def test_an_api_that_says_nothing_is_asked_now_and_then_however_much_there_is_for_it(ipc_server: IPCServer) -> None:
    api = Api(ipc_server)
    api.say(Abort("a"))
    client, _ = next_message(ipc_server)
    started, heard = time.monotonic(), 0
    while time.monotonic() < started + 1.2:
        ipc_server.send(client, Output("a", [1]))
        heard += isinstance(api.hear(), EngineStatus)
    assert 1 <= heard <= 4, "no more than one in DOUBT_S"
    api.die()


def test_the_age_of_what_is_told_shows_whether_the_engine_moves(ipc_server: IPCServer) -> None:
    api = Api(ipc_server)
    time.sleep(0.3)
    api.say(QueryStatus(1))
    old = api.hear()
    told = time.monotonic()
    ipc_server.status = STATUS
    api.say(QueryStatus(2))
    new = api.hear()
    assert isinstance(old, EngineStatus) and isinstance(new, EngineStatus)
    assert (old.query_id, new.query_id) == (1, 2)
    since = time.monotonic() - told
    assert old.age_s >= 0.3 and 0 <= new.age_s <= since
    api.die()


def test_a_file_that_a_killed_engine_left_is_no_obstacle() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        path = Path(directory) / "engine.sock"
        with zmq.Context() as context, context.socket(zmq.ROUTER) as old:
            old.bind(f"ipc://{path}")
        path.touch()
        IPCServer(path, STATUS, lambda: b"").close()


def test_the_socket_of_an_engine_that_lives_is_left_to_it(ipc_server: IPCServer) -> None:
    with pytest.raises(UsageError, match="an engine is listening on"):
        IPCServer(ipc_server.path, STATUS, lambda: b"")
    api = Api(ipc_server)
    api.say(QueryStatus(1))
    assert api.hear()
    api.die()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a full queue refuses as a closed socket does")
def test_an_engine_that_stands_still_is_not_taken_for_dead(tmp_path: Path) -> None:
    path = tmp_path / "engine.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(path))
        listener.listen(0)
        for _ in range(2):
            caller = stack.enter_context(socket.socket(socket.AF_UNIX))
            caller.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                caller.connect(str(path))
        assert module.is_heard(path)
    assert not module.is_heard(path)


def test_somebodys_file_is_not_taken_for_a_socket(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(UsageError, match=r"notes: it is somebody's file, not a socket; choose another --engine-socket"):
        IPCServer(path, STATUS, lambda: b"")
    assert path.read_text() == "mine"
