"""Engines and apis that are killed and stopped."""

from __future__ import annotations

import os
import signal
from typing import Any

import httpx
import psutil
import pytest

pytestmark = pytest.mark.slow

ALONE = pytest.mark.parametrize("served", ["pp"], indirect=True)
FAULTS = pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])


@ALONE
@FAULTS
def test_an_engine_that_goes_is_replaced_and_its_streams_go_on(served: Any, fault: signal.Signals) -> None:
    [engine] = served.engines()
    ranks = served.ranks()
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 20, "tokens")
    os.kill(engine.pid, fault)
    served.wait(lambda: not engine.is_running(), "the engine is gone")
    new = httpx.post(f"{served.url}/v1/completions", timeout=240, json={"model": "default", "prompt": "x", "max_tokens": 1})
    assert new.status_code == 200 or (new.status_code == 503 and int(new.headers["retry-after"]) >= 1)
    served.check(calls)
    served.wait(lambda: not any(psutil.pid_exists(pid) for pid in ranks), "the old ranks are gone")
    served.wait(served.settled, "recovery")


@ALONE
@FAULTS
def test_an_api_that_goes_leaves_engine_and_model_alone(served: Any, fault: signal.Signals) -> None:
    api, [engine], ranks = served.api(), served.engines(), served.ranks()
    calls = served.load()
    long = served.call({"prompt": [5, 6], "max_tokens": 1000, "temperature": 0, "stream": True})
    served.wait(lambda: calls[0].chunks > 20 and long.chunks > 0, "tokens")
    os.kill(api.pid, fault)
    served.wait(lambda: not api.is_running(), "the api is gone")
    served.wait(served.settled, "another api")
    assert long.join().error is not None, "the connection broke: the client knows that its answer is not whole"
    for call in calls:
        assert call.join().error is not None or call.result["finish_reason"] == "length", "nor has another half of one"
    served.wait(lambda: served.get("/v1/status")["num_running"] == 0, "work of dead clients ends")
    assert served.get("/v1/status")["num_waiting"] == 0
    assert [one.pid for one in served.engines()] == [engine.pid] and served.ranks() == ranks
    served.check(served.load())


@ALONE
def test_api_and_rank_at_once(served: Any) -> None:
    ranks = served.ranks()
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 5, "tokens")
    os.kill(served.api().pid, signal.SIGKILL)
    os.kill(ranks[0], signal.SIGKILL)
    for call in calls:
        call.join()
    served.wait(lambda: served.settled() and not set(ranks) & set(served.ranks()), "both are replaced")
    served.check(served.load())


@ALONE
def test_engine_and_api_at_once(served: Any) -> None:
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 5, "tokens")
    [engine] = served.engines()
    api = served.api()
    for victim in (engine, api):
        os.kill(victim.pid, signal.SIGKILL)
    for call in calls:
        call.join()
    served.wait(lambda: served.settled() and served.engines() != [engine], "both are replaced")
    served.check(served.load())


@ALONE
def test_a_rank_that_stands_still_while_a_new_engine_loads(served: Any) -> None:
    calls = served.load()
    served.wait(lambda: calls[0].chunks > 5, "tokens")
    [engine] = served.engines()
    old = served.ranks()
    os.kill(engine.pid, signal.SIGKILL)

    def newcomers() -> list[int]:
        return [one.pid for one in served.processes("tandem.executors.worker") if one.pid not in old]

    served.wait(lambda: len(newcomers()) == 2, "new ranks")
    os.kill(newcomers()[0], signal.SIGSTOP)
    served.check(calls)
    served.wait(served.settled, "recovery")
