"""Replicas that lend KV, as an engine sees them: its ranks are told of those that have what they can use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines import ready, settings_of
from tandem.engine import recovery
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.errors import RankFailure
from tandem.executors.executor import Executor, Progress, Report
from tandem.protocol.control import Ready
from tandem.protocol.kv_blocks import Fetch, Survey, UseRemoteStores
from tandem.protocol.step import StepPlan
from tandem.testing import tiny_model

OWN = ("here/space", "tcp://10.0.0.1:5")
FAR = ("far/space", "tcp://10.0.0.2:5")


class Disks(Executor):
    """Two ranks on one machine that keep KV, and lend it; they write down what they are ordered."""

    def __init__(self, *, keeps: bool = True) -> None:
        self.keeps, self.failure = keeps, False
        self.orders: list[Fetch | UseRemoteStores | Survey] = []

    def start(self, progress: Progress | None = None) -> list[Ready]:
        kept = {"disk_blocks": [], "store": OWN[0], "lends": OWN[1]} if self.keeps else {}
        return [ready(rank, **kept) for rank in range(2)]

    def submit(self, plan: StepPlan) -> None:
        raise AssertionError("nothing runs")

    def fetch(self, order: Fetch | UseRemoteStores | Survey) -> None:
        self.orders.append(order)

    def collect(self, timeout_s: float) -> list[Report]:
        if self.failure:
            self.failure = False
            raise RankFailure("rank 1 was killed (SIGKILL)", rank=1, cause="died")
        return []

    def close(self) -> None:
        pass

    def taken(self) -> list[Fetch | UseRemoteStores | Survey]:
        orders, self.orders = self.orders, []
        return orders


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Disks], Engine]:
    monkeypatch.setattr(recovery, "BACKOFF_S", 0.001)
    settings = settings_of(
        tiny_model(tmp_path / "model"), pipeline_parallel_size=2, self_check=False, kv_tokens=2000, kv_disk=str(tmp_path / "kv")
    )

    def make(disks: Disks) -> Engine:
        engine = Engine(settings, plan_layout(settings), disks)
        engine.start()
        return engine

    return make


def test_ranks_are_told_of_those_who_lend_what_they_can_use(serve: Callable[[Disks], Engine]) -> None:
    disks = Disks()
    engine = serve(disks)
    engine.pump(0.0)
    assert not disks.taken() and engine.status().lends == [OWN] and engine.status().kv_reach == [OWN[0]]
    told = UseRemoteStores([FAR, ("old/another-version", "tcp://10.0.0.3:5"), ("", "tcp://10.0.0.4:5")])
    for _ in range(2):
        engine.meet(told)
        engine.pump(0.0)
    borrow, survey = disks.taken()
    assert borrow == UseRemoteStores([FAR, OWN]) and isinstance(survey, Survey), "others are not asked, and it is said once"
    assert engine.status().kv_reach == [FAR[0], OWN[0]] and engine.status().kv_store == OWN[0]
    disks.failure = True
    engine.pump(0.0)
    engine.pump(0.0)
    assert engine.restarts == 1 and disks.taken()[0] == UseRemoteStores([FAR, OWN]), "new ranks know it too"
    engine.meet(UseRemoteStores([]))
    engine.pump(0.0)
    assert disks.taken()[0] == UseRemoteStores([OWN]) and engine.status().kv_reach == [OWN[0]]


def test_ranks_that_keep_nothing_are_told_nothing(serve: Callable[[Disks], Engine]) -> None:
    disks = Disks(keeps=False)
    engine = serve(disks)
    engine.meet(UseRemoteStores([FAR]))
    engine.pump(0.0)
    assert not disks.taken() and not engine.status().lends and not engine.status().kv_reach
