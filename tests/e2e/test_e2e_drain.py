"""SIGTERM in every layout: not ready at once, what runs goes on until the deadline, what is left ends with an error."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import served
from served import TLS, Call, assert_gone, wait_until
from tandem.launchers.process_groups import free_ports
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
LAYOUTS = {"stages": ["-pp", "2"], "replicas": ["-dp", "2"]}
ENDLESS = 25_000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One whose context is long enough for streams that do not end."""
    path = tmp_path_factory.mktemp("model")
    return str(tiny_model(path, config={"max_position_embeddings": 60_000}))


@contextmanager
def command(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A tandem command; afterwards nothing of it is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tandem", *arguments], text=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    family: list[psutil.Process] = []
    try:
        yield process
        with suppress(psutil.NoSuchProcess):
            family = psutil.Process(process.pid).children(recursive=True)
    finally:
        process.kill()
        process.communicate()
        assert_gone(family)


@contextmanager
def serving(model: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with served.serving(model, "--kv-tokens", "60000", *arguments) as server:
        wait_until(lambda: ready(server.url))
        yield server.process, server.url


def streams(url: str, count: int, max_tokens: int) -> list[Call]:
    """Streams that have begun."""
    body = {"prompt": "go on", "max_tokens": max_tokens, "temperature": 0, "stream": True}
    started = [Call(url, body) for _ in range(count)]
    wait_until(lambda: all(one.chunks for one in started))
    return started


def ready(url: str) -> bool:
    return httpx.get(f"{url}/health/ready", timeout=240, verify=TLS).status_code == 200


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_runs_is_finished_and_nothing_new_is_taken(model: str, layout: str) -> None:
    with serving(model, *LAYOUTS[layout], "--drain-timeout", "300") as (process, url):
        running = streams(url, 3, 1000)
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not ready(url))
        assert all(one.running for one in running), "not ready before anything has ended"
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=240, verify=TLS)
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "shutting_down"
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.get(f"{url}/health/live", timeout=240, verify=TLS).status_code == 200
        for one in running:
            assert (result := one.join().result)["done"] and result["finish_reason"] == "length"
        assert process.wait(240) == 0


@pytest.mark.parametrize(("how", "layout"), [("deadline", "replicas"), ("second signal", "stages")])
def test_what_is_left_ends_with_a_clear_error(model: str, layout: str, how: str) -> None:
    timeout = "2" if how == "deadline" else "600"
    with serving(model, *LAYOUTS[layout], "--drain-timeout", timeout) as (process, url):
        running = streams(url, 2, ENDLESS)
        process.send_signal(signal.SIGTERM)
        if how == "second signal":
            wait_until(lambda: not ready(url))
            process.send_signal(signal.SIGTERM)
        for one in running:
            result = one.join().result
            assert result["error"]["code"] == "shutting_down" and result["error"]["type"] == "server_error"
            assert result["done"] and "finish_reason" not in result
        assert process.wait(240) == 0


@contextmanager
def apart(model: str, socket_path: Path, timeout: str) -> Iterator[tuple[subprocess.Popen[str], Any, str]]:
    port = str(free_ports(1)[0])
    common = ["--engine-socket", str(socket_path), "--drain-timeout", timeout]
    url = f"http://127.0.0.1:{port}"
    with command("engine", model, "--kv-tokens", "60000", *common) as engine, command("api", "--port", port, *common) as api:
        wait_until(lambda: _answers(url) and ready(url))
        yield engine, api, url


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live", timeout=240, verify=TLS).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("who", ["engine", "api"])
def test_apart(model: str, tmp_path: Path, who: str) -> None:
    with apart(model, tmp_path / "e.sock", "300") as (engine, api, url):
        running = streams(url, 2, 1000)
        (engine if who == "engine" else api).send_signal(signal.SIGTERM)
        wait_until(lambda: not ready(url))
        assert all(one.running for one in running)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=240, verify=TLS).status_code == 503
        for one in running:
            assert (result := one.join().result)["done"] and result["finish_reason"] == "length"
        assert (engine if who == "engine" else api).wait(240) == 0
        other = api if who == "engine" else engine
        assert other.poll() is None, "the other one stays"
        assert os.path.exists(tmp_path / "e.sock") == (who == "api")


def test_an_engine_apart_at_its_deadline(model: str, tmp_path: Path) -> None:
    with apart(model, tmp_path / "e.sock", "3") as (engine, _, url):
        [running] = streams(url, 1, ENDLESS)
        engine.send_signal(signal.SIGTERM)
        result = running.join().result
        assert result["done"] and result["error"]["code"] == "shutting_down"
        assert engine.wait(240) == 0
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=240, verify=TLS)
        assert refused.status_code == 503 and int(refused.headers["retry-after"]) > 0
