"""The end of a rank group."""

from __future__ import annotations

import signal
import time
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest

from tandem.errors import RankFailure, TransportError
from tandem.executors import cluster
from tandem.executors.cluster import ClusterExecutor
from tandem.launchers.base import Launcher
from tandem.protocol.control import Failure, Pong
from tandem.protocol.pictures import EncodePicture
from tandem.protocol.step import StepPlan

FULL = "[METAL] Command buffer execution failed: Insufficient Memory (00000008:kIOGPUCommandBufferCallbackErrorOutOfMemory)"


class Away:
    """A rank on a machine that cannot be reached: it is not heard to end."""

    pid, stopped, code, kills = 1, False, None, 0
    now = 0.0
    """Seconds that all of them have been waited for."""

    def poll(self) -> int | None:
        return self.code

    def describe_exit(self) -> str:
        return "is gone"

    def kill(self) -> None:
        self.kills += 1

    def wait(self, timeout_s: float) -> bool:
        Away.now += timeout_s
        return False


def an_executor(ranks: int) -> ClusterExecutor:
    spec = cast(Any, type("Spec", (), {"rank": 0}))
    executor = ClusterExecutor(
        [spec] * ranks, cast(Launcher, None), start_timeout_s=1.0, step_timeout_s=1.0, rejoin_timeout_s=1.0
    )
    executor._processes = [Away() for _ in range(ranks)]
    return executor


def test_ranks_that_cannot_be_reached_are_waited_for_together_and_aloud(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "KILL_S", 0.5)
    monkeypatch.setattr(cluster, "STOP_GRACE_S", 0.0)
    executor = an_executor(20)
    ranks: list[Any] = list(executor._processes)
    called: list[float] = []
    executor.on_wait = lambda: called.append(Away.now)
    monkeypatch.setattr(Away, "now", 0.0)
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: Away.now))
    executor.close()
    assert Away.now == pytest.approx(0.5), "one after the other it would be ten seconds"
    assert len(called) >= 3, "whoever asks hears that the engine lives"
    assert all(rank.kills == 1 for rank in ranks) and executor.pids == []


@pytest.mark.parametrize(
    ("code", "busy", "blame"),
    [
        (-signal.SIGKILL, True, True),
        (-signal.SIGKILL, False, False),
        (-signal.SIGSEGV, True, True),
        (1, True, True),
        (-signal.SIGTERM, True, False),
        (-signal.SIGINT, True, False),
        (-signal.SIGHUP, True, False),
    ],
)
def test_who_may_be_to_blame_for_a_death(code: int, busy: bool, blame: bool) -> None:
    """No request sends SIGTERM, and none is worked on by a rank that has nothing to do."""
    executor = an_executor(2)
    rank: Any = executor._processes[1]
    rank.code = code
    if busy:
        executor.watchdog.planned(StepPlan(0, 0, decode=["a"]), time.monotonic())
    failure = executor._death(1, rank)
    assert (failure.cause, failure.rank, failure.blame) == ("died", 1, blame)


class Gone:
    """The bus when rank 1 has ended, and what it had said of it waits to be read."""

    said: ClassVar = [(b"0:g", Pong(0, 1, 0, False)), (b"1:g", Failure(1, "RuntimeError", FULL)), None]

    def send(self, identity: bytes, command: object) -> None:
        if identity == b"1:g":
            raise TransportError("is not connected: Host unreachable")

    def receive(self, timeout_s: float) -> object:
        return self.said.pop(0)


def test_why_a_rank_ended_is_told_when_it_is_found_gone() -> None:
    executor = an_executor(1)
    executor._specs = [cast(Any, SimpleNamespace(rank=rank, stage=rank)) for rank in range(2)]
    executor._bus, executor._generation = cast(Any, Gone()), "g"
    with pytest.raises(RankFailure, match="memory is full") as failure:
        executor.submit(StepPlan(0, 0, decode=["a"]))
    assert (failure.value.cause, failure.value.rank) == ("memory", 1)


def test_inputs_of_pictures_that_cannot_be_served_are_no_fault_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_port(*_: object) -> None:
        raise TransportError("127.0.0.1:* cannot be listened on")

    executor = an_executor(1)
    executor._launcher = cast(Any, SimpleNamespace(bus_host="127.0.0.1"))
    monkeypatch.setattr(cluster, "BlobServer", no_port)
    with pytest.raises(RankFailure, match="inputs of pictures cannot be served: .* cannot be listened on") as failure:
        executor.encode(EncodePicture("0" * 64, [1], b"inputs"))
    assert not failure.value.blame
