"""Replicas that are killed and stopped: requests move on, or wait until there is a replica again."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("served", ["dp"], indirect=True)]

FAULTS = pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
REPLICAS = pytest.mark.parametrize("replica", [0, 1])


def both(served: Any) -> None:
    served.wait(lambda: served.settled(2), "both replicas are there")


@FAULTS
@REPLICAS
def test_while_idle(served: Any, replica: int, fault: signal.Signals) -> None:
    both(served)
    engine = served.engines()[replica]
    os.kill(engine.pid, fault)
    served.wait(lambda: not engine.is_running(), "it is noticed without any request")
    served.check(served.load())


@FAULTS
@REPLICAS
def test_during_prefill(served: Any, replica: int, fault: signal.Signals) -> None:
    both(served)
    calls = served.load()
    served.wait(lambda: served.get("/v1/status")["num_running"] > 0, "it runs")
    os.kill(served.engines()[replica].pid, fault)
    served.check(calls)


@FAULTS
@REPLICAS
def test_during_decode(served: Any, replica: int, fault: signal.Signals) -> None:
    both(served)
    calls = served.load()
    served.wait(lambda: min(calls[0].chunks, calls[1].chunks) > 10, "tokens")
    os.kill(served.engines()[replica].pid, fault)
    served.check(calls)


def test_all_replicas_at_once(served: Any) -> None:
    both(served)
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 10, "tokens")
    for engine, fault in zip(served.engines(), (signal.SIGKILL, signal.SIGSTOP), strict=True):
        os.kill(engine.pid, fault)
    served.check(calls)
    both(served)
