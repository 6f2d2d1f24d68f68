"""Ranks that are killed and stopped, whatever they do at that moment: each answer is that of the undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.slow

RANK_GROUPS = pytest.mark.parametrize("served", ["pp", "tp"], indirect=True)
RANK = "tandem.executors.worker"


def hurt(served: Any, pids: list[int], **faults: tuple[int, signal.Signals]) -> None:
    """Which rank goes how, by layout: each moment has both layouts and both ways, each layout all four."""
    rank, fault = faults[served.layout]
    os.kill(pids[rank], fault)


def recovered(served: Any, restarts: float, pids: list[int]) -> None:
    """One more rank group, which serves; nothing is left of the old one."""
    # On a busy machine all may have been answered by the time of the fault, which is noticed after that.
    served.wait(lambda: served.metric("tandem_gang_restarts_total") >= restarts, "it is noticed")
    # What /health tells may be a second old, so that the old rank group still seems to serve.
    served.wait(lambda: served.settled() and not set(pids) & set(served.ranks()), "recovery")
    assert served.metric("tandem_gang_restarts_total") == restarts
    served.wait(lambda: not any(psutil.pid_exists(pid) for pid in pids), "old ranks are gone")


def prefilling(served: Any) -> list[Any]:
    """Calls of which the last one, with its long prompt, has brought no token a moment ago."""
    for _ in range(20):
        calls = [*served.load()]
        last = calls[-1]
        served.wait(lambda last=last: served.get("/v1/status")["num_running"] > 0 or not last.running, "it runs")
        if not last.chunks:
            return calls
        served.check(calls)
    raise AssertionError("prompts are computed too fast for this test")


@RANK_GROUPS
def test_while_idle(served: Any) -> None:
    pids, restarts = served.ranks(), served.metric("tandem_gang_restarts_total")
    hurt(served, pids, pp=(0, signal.SIGKILL), tp=(1, signal.SIGSTOP))
    served.wait(lambda: served.metric("tandem_gang_restarts_total") > restarts, "it is noticed without any request")
    served.check(served.load())
    recovered(served, restarts + 1, pids)


@RANK_GROUPS
def test_during_prefill(served: Any) -> None:
    pids, restarts = served.ranks(), served.metric("tandem_gang_restarts_total")
    calls = prefilling(served)
    hurt(served, pids, pp=(1, signal.SIGSTOP), tp=(0, signal.SIGKILL))
    served.check(calls)
    recovered(served, restarts + 1, pids)


@RANK_GROUPS
def test_during_decode(served: Any) -> None:
    pids, restarts = served.ranks(), served.metric("tandem_gang_restarts_total")
    calls = served.load()
    served.wait(lambda: min(calls[0].chunks, calls[1].chunks) > 20, "tokens")
    hurt(served, pids, pp=(0, signal.SIGSTOP), tp=(1, signal.SIGKILL))
    served.check(calls)
    recovered(served, restarts + 1, pids)


@RANK_GROUPS
def test_while_the_next_rank_group_loads(served: Any) -> None:
    """A fault during recovery: requests wait through both."""
    pids, restarts = served.ranks(), served.metric("tandem_gang_restarts_total")
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 5, "tokens")
    os.kill(pids[1], signal.SIGKILL)

    def newcomers() -> list[int]:
        return [one.pid for one in served.processes(RANK) if one.pid not in pids]

    served.wait(lambda: len(newcomers()) == 2, "new ranks")
    time.sleep(0.5)
    second = newcomers()
    hurt(served, second, pp=(1, signal.SIGKILL), tp=(0, signal.SIGSTOP))
    served.check(calls)
    recovered(served, restarts + 2, [*pids, *second])


@RANK_GROUPS
def test_two_at_once(served: Any) -> None:
    pids, restarts = served.ranks(), served.metric("tandem_gang_restarts_total")
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 20, "tokens")
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    served.check(calls)
    recovered(served, restarts + 1, pids)


@RANK_GROUPS
def test_what_was_found_is_said_and_counted(served: Any) -> None:
    """After all the faults above: causes are told apart."""
    counted = {
        cause: served.metric(f'tandem_gang_failures_total{{cause="{cause}",')
        for cause in ("died", "stopped", "silent", "stuck", "link", "start", "error")
    }
    assert counted["died"] >= 3, counted
    assert counted["stopped"] >= 2, counted
    reasons = [line for line in served.log.read_text().splitlines() if "; all parts restart" in line]
    assert counted["died"] + counted["stopped"] == len(reasons), "\n".join(reasons)
    assert "stands still: its process is stopped" in served.log.read_text()
    assert served.metric("tandem_gang_recovery_seconds_count") >= 5
