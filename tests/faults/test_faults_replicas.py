"""Replicas that are killed and stopped: requests move on, or wait until there is a replica again."""

from __future__ import annotations

import os
import signal
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("served", ["dp"], indirect=True)]

KILLED, STOPPED = (0, signal.SIGKILL), (1, signal.SIGSTOP)


def both(served: Any) -> None:
    served.wait(lambda: served.settled(2) and len(served.engines()) == 2, "both replicas are there")


def hurt(served: Any, replica: int, fault: signal.Signals) -> psutil.Process:
    engine = served.engines()[replica]
    os.kill(engine.pid, fault)
    return engine


def test_while_idle(served: Any) -> None:
    both(served)
    engine = hurt(served, *STOPPED)
    served.wait(lambda: not engine.is_running(), "it is noticed without any request")
    served.check(served.load())


def test_during_prefill(served: Any) -> None:
    both(served)
    calls = served.load()
    served.wait(lambda: served.get("/v1/status")["num_running"] > 0 or not calls[-1].running, "it runs")
    engine = hurt(served, *KILLED)
    served.check(calls)
    served.wait(lambda: not engine.is_running(), "it is replaced")


@pytest.mark.parametrize(("replica", "fault"), [KILLED, STOPPED])
def test_during_decode(served: Any, replica: int, fault: signal.Signals) -> None:
    both(served)
    calls = served.load()
    served.wait(lambda: min(calls[0].chunks, calls[1].chunks) > 10, "tokens")
    engine = hurt(served, replica, fault)
    served.check(calls)
    served.wait(lambda: not engine.is_running(), "it is replaced")


def test_all_replicas_at_once(served: Any) -> None:
    both(served)
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 10, "tokens")
    gone = [hurt(served, 1, signal.SIGSTOP), hurt(served, 0, signal.SIGKILL)]
    served.check(calls)
    served.wait(lambda: not any(engine.is_running() for engine in gone), "they are replaced")
    both(served)
