"""One head's programs never hold up another's, and a head that is forgotten has none."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import msgspec
import pytest
import zmq

from served import wait_until
from tandem.launchers.agent import agent_server as module
from tandem.launchers.agent.agent_server import UNPAIRED, Agent
from tandem.launchers.agent.pairing import HeadSide
from tandem.launchers.agent.trust import Identity, Peer, Trust
from tandem.protocol.agent_messages import (
    Beat,
    Data,
    Ended,
    OpenSession,
    PairHello,
    PairProof,
    PairRefused,
    PairReply,
    PairRequest,
    SessionReply,
    SessionRequest,
)

PART = """
import sys
from types import SimpleNamespace as Some
from tandem.launchers.node_agent import NodeAgent
process = Some(pid=7, poll=lambda: -9, describe_exit=lambda: "was killed (SIGKILL)")
agent = Some(_rank=Some(number=1, process=process), _end_rank=lambda: None, _events=int(sys.argv[1]))
NodeAgent._report_exit(agent, Some(send=lambda message: None))
"""
PROGRAMS = {
    "part": PART,
    "echo": "import sys\nfor line in sys.stdin.buffer:\n    sys.stdout.write(line.decode())\n    sys.stdout.flush()",
    "deaf": "import time\nimport sys\nsys.stdout.write('up\\n')\nsys.stdout.flush()\ntime.sleep(100)",
}


class Head:
    """A head's end of a session."""

    def __init__(self, agent: Agent, identity: Identity) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.curve_serverkey = agent.public.encode()
        self._socket.curve_publickey, self._socket.curve_secretkey = identity.public.encode(), identity.secret.encode()
        self._socket.connect(f"tcp://127.0.0.1:{agent.port}")

    def send(self, message: SessionRequest) -> None:
        with suppress(zmq.Again):  # there is no connection
            self._socket.send(msgspec.msgpack.encode(message), zmq.DONTWAIT)

    def hear(self, seconds: float = 240) -> SessionReply | None:
        """The next word that is no beat."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._socket.poll(100):
                message: SessionReply = msgspec.msgpack.decode(self._socket.recv(), type=SessionReply)
                if not isinstance(message, Beat):
                    return message
            self.send(Beat())
        return None

    def open(self, program: str) -> Head:
        self.send(OpenSession(program))
        return self

    def close(self) -> None:
        self._socket.close()


class Machine:
    """An agent in a thread, and heads that it is paired with."""

    def __init__(self) -> None:
        self.trust = Trust("agent")
        self.agent = Agent("here", self.trust, host="127.0.0.1", port=0)
        self.heads: list[Head] = []
        self.pause = 0.0
        self._over = False
        self._thread = threading.Thread(target=self.agent.serve, args=(self._until,))
        self._thread.start()

    def _until(self) -> bool:
        pause, self.pause = self.pause, 0.0
        time.sleep(pause)
        return self._over

    def head(self, name: str) -> Head:
        identity = Identity(*(key.decode() for key in zmq.curve_keypair()))
        self.trust.add(name, Peer(identity.public))
        self.heads.append(Head(self.agent, identity))
        return self.heads[-1]

    def close(self) -> None:
        self._over = True
        self._thread.join(240)
        self.agent.close()
        for head in self.heads:
            head.close()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(module, "PROGRAMS", {name: f"agent_{name}" for name in PROGRAMS})
    for name, text in PROGRAMS.items():
        (tmp_path / f"agent_{name}.py").write_text(text)
    machine = Machine()
    yield machine
    machine.close()


def echo(head: Head, words: str) -> None:
    head.send(Data(words.encode() + b"\n"))
    assert head.hear() == Data(words.encode() + b"\n")


def test_a_program_that_does_not_read_holds_up_nobody_and_is_ended(machine: Machine) -> None:
    deaf, other = machine.head("a").open("deaf"), machine.head("b").open("echo")
    assert deaf.hear() == Data(b"up\n")
    deaf.send(Data(b"x" * 500_000))  # more than a pipe holds
    echo(other, "still here")
    for _ in range(20):
        deaf.send(Data(b"x" * 500_000))
    echo(other, "and here")
    assert deaf.hear() == Ended(-9, "it does not read what it is sent")
    echo(other, "always")


def test_the_agents_terminal_says_that_a_part_has_ended(machine: Machine, caplog: pytest.LogCaptureFixture) -> None:
    said = "the part of the model here (process 7) was killed (SIGKILL); the machine that serves starts it anew"
    echo(machine.head("a").open("echo"), said)  # a program's output is for the head alone
    assert said not in caplog.messages
    machine.head("b").open("part")
    wait_until(lambda: said in caplog.messages)


def test_programs_that_do_not_end_hold_up_nobody(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 600.0)
    stubborn, other = [machine.head(f"a{i}").open("deaf") for i in range(3)], machine.head("b").open("echo")
    for one in stubborn:
        assert one.hear() == Data(b"up\n")
    echo(other, "before")
    for one in stubborn:
        for _ in range(20):
            one.send(Data(b"x" * 500_000))
    wait_until(lambda: sum(one.reason is not None for one in list(machine.agent._sessions.values())) == 3)
    echo(other, "meanwhile")
    for running in list(machine.agent._sessions.values()):
        if running.reason is not None:
            os.kill(running.pid, signal.SIGKILL)
    assert [one.hear() for one in stubborn] == [Ended(-9, "it does not read what it is sent")] * 3


def test_after_a_pause_nobody_who_has_spoken_is_struck_off(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = [machine.head(f"h{i}").open("echo") for i in range(4)]
    for head in heads:
        echo(head, "up")
    monkeypatch.setattr(module, "SILENCE_S", 2.0)
    machine.pause = 2.5  # as SIGSTOP does
    for _ in range(27):
        time.sleep(0.1)
        for head in heads:
            head.send(Beat())
    for head in heads:
        echo(head, "still here")


def test_what_is_sent_is_read_to_its_end(machine: Machine) -> None:
    head = machine.head("a").open("echo")
    lines = [f"{i} {'x' * 1000}" for i in range(2000)]
    for start in range(0, 2000, 200):
        head.send(Data("".join(f"{line}\n" for line in lines[start : start + 200]).encode()))
    head.send(Data(b""))
    got = b""
    while isinstance(message := head.hear(), Data):
        got += message.data
    assert message == Ended(0, "") and got.decode().split("\n")[:-1] == lines


def test_a_head_that_is_forgotten_is_out_at_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_S", 60.0)
    head = machine.head("a").open("echo")
    echo(head, "in")
    machine.trust.forget("a")
    assert head.hear() == Ended(0, UNPAIRED)
    head.open("echo")
    assert head.hear() == Ended(255, UNPAIRED)  # over the connection that it still has
    again = machine.head("a").open("echo")
    machine.trust.forget("a")
    assert not isinstance(again.hear(1.0), Data)
    sessions = machine.agent._sessions
    wait_until(lambda: all(one.reason is not None for one in list(sessions.values())), "it is still served")


def test_two_threads_that_look_whom_to_trust_overlook_nobody(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One has read who was trusted before a head came, and notes it while the other notes who is now."""
    agent = Agent("there", machine.trust, host="127.0.0.1", port=0)
    read, noting, noted = threading.Event(), threading.Event(), threading.Event()
    peers = machine.trust.peers

    def slow_peers() -> dict[str, Peer]:
        found = peers()
        if threading.current_thread() is slow and not read.is_set():
            read.set()
            noting.wait(240)
        return found

    class Watched(Agent):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if threading.current_thread() is quick and not noting.is_set():
                noting.set()
                noted.wait(240)

    key = zmq.curve_keypair()[0]
    slow, quick = (threading.Thread(target=agent.admits, args=(key.decode(),)) for _ in range(2))
    with closing(agent):
        monkeypatch.setattr(machine.trust, "peers", slow_peers)
        monkeypatch.setattr(agent, "__class__", Watched)
        machine.trust.add("before", Peer(zmq.curve_keypair()[0].decode()))
        slow.start()
        assert read.wait(240)
        machine.trust.add("new", Peer(key.decode()))
        quick.start()
        slow.join(240)
        noted.set()
        quick.join(240)
        assert agent.admits(key.decode())


def test_what_cannot_be_started_is_told(machine: Machine) -> None:
    head = machine.head("a").open("sh")
    assert head.hear() == Ended(255, "sh cannot be started here")


def ask(link: zmq.Socket[bytes], request: PairRequest) -> PairReply:
    link.send(msgspec.msgpack.encode(request))
    assert link.poll(240_000)
    reply: PairReply = msgspec.msgpack.decode(link.recv(), type=PairReply)
    return reply


def pair(machine: Machine) -> PairReply:
    """What the agent says in the end to a head that has its code."""
    hello = PairHello("head", zmq.curve_keypair()[0].decode())
    code = machine.agent.pairing.open()
    with zmq.Context.instance().socket(zmq.DEALER) as link:
        link.linger = 0
        link.connect(f"tcp://127.0.0.1:{machine.agent.pair_port}")
        head = HeadSide(code, hello, ask(link, hello))
        return ask(link, head.confirm(ask(link, head.start())))


def test_a_pairing_that_cannot_be_written_down_is_refused_and_the_agent_goes_on(machine: Machine, tmp_path: Path) -> None:
    running = machine.head("a").open("echo")
    in_the_way = tmp_path / "agent" / "peers.tmp"
    in_the_way.mkdir()
    refused = pair(machine)
    assert isinstance(refused, PairRefused) and "here cannot write down whom it trusts: " in refused.reason
    echo(running, "still here")
    in_the_way.rmdir()
    assert isinstance(pair(machine), PairProof) and "head" in machine.trust.peers()


def test_a_connection_to_the_pairing_port_lasts_no_longer_than_a_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(module, "LIFE_S", 0.1)
    ready = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
    with closing(Machine()) as machine, socket.create_connection(("127.0.0.1", machine.agent.pair_port), timeout=240) as raw:
        raw.sendall(greeting + b"\x04" + bytes([len(ready)]) + ready)
        got = b""
        while data := raw.recv(4096):
            got += data
        assert b"READY" in got, "its handshake was complete"
