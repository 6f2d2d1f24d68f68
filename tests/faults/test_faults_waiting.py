"""A model's files that go away while a process is replaced, and engines that die while the server drains."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.slow

FLAGS = ("--prefill-chunk", "8", "--prefix-cache", "0", "--start-timeout", "120")
BODY = {"prompt": [7, 8, 9], "max_tokens": 300, "temperature": 0, "stream": True}


@pytest.fixture
def own_model(model: Path, tmp_path: Path) -> Path:
    return shutil.copytree(model, tmp_path / "own")


def details(server: Any) -> list[str]:
    health = server.get("/health")
    return [health["detail"], *(one["detail"] for one in health["replicas"])]


@pytest.mark.parametrize("layout", [("-pp", "2"), ()], ids=["ranks", "engine"])
def test_files_that_are_away_cost_waiting_and_no_request(running: Any, own_model: Path, layout: tuple[str, ...]) -> None:
    """A rank looks for them when it is replaced, and so does an engine that computes itself."""
    away = own_model.with_name("away")
    with running(str(own_model), *layout, *FLAGS, "--max-restarts", "30") as server:
        undisturbed = server.call(BODY).join().result
        call = server.call(BODY)
        server.wait(lambda: call.chunks > 20, "tokens")
        own_model.rename(away)
        victim = server.ranks()[-1] if layout else server.engines()[0].pid
        os.kill(victim, signal.SIGKILL)
        server.wait(lambda: any(str(own_model) in one for one in details(server)), "what is waited for")
        port = server.url.rsplit(":", 1)[1]
        words = [sys.executable, "-m", "tandem", "status", "--port", port, "--interval", "0"]
        variables = {**os.environ, "TANDEM_RUNTIME_DIR": str(server.log.parent)}
        # An api on a busy machine may not answer one look in time.
        server.wait(
            lambda: str(own_model) in subprocess.run(words, text=True, capture_output=True, check=False, env=variables).stdout,
            "what tandem status says",
        )
        away.rename(own_model)
        assert call.join().result == undisturbed, server.tail()
        server.wait(server.settled, "recovery")


def test_files_that_stay_away_end_the_server_and_clients_hear_it_at_once(running: Any, own_model: Path) -> None:
    with running(str(own_model), "-pp", "2", *FLAGS, "--max-restarts", "2", "--drain-timeout", "600") as server:
        call = server.call({**BODY, "max_tokens": 1000})
        server.wait(lambda: call.chunks > 5, "tokens")
        shutil.rmtree(own_model)
        os.kill(server.ranks()[1], signal.SIGKILL)
        assert server.process.wait(240) == 3, server.tail()
        assert "gave up" in call.join().result["error"]["message"], call.result


def drains(server: Any) -> bool:
    """It says so, or takes no connections any more."""
    with suppress(httpx.HTTPError):
        return bool(server.get("/health")["status"] == "draining")
    return True


def test_an_engine_that_dies_while_the_server_drains_is_replaced(running: Any, model: Path) -> None:
    with running(str(model), "-pp", "2", *FLAGS, "--drain-timeout", "600") as server:
        body = {**BODY, "max_tokens": 600}
        undisturbed = server.call(body).join().result
        calls = [server.call(body) for _ in range(2)]
        server.wait(lambda: all(call.chunks > 5 for call in calls), "tokens")
        server.process.send_signal(signal.SIGTERM)
        server.wait(lambda: drains(server), "draining")
        os.kill(server.engines()[0].pid, signal.SIGKILL)
        assert [call.join().result for call in calls] == [undisturbed] * 2, server.tail()
        assert server.process.wait(240) == 0
