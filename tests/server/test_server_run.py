from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager

import httpx
import msgspec
import pytest

from tandem import env
from tandem.config.loading import to_json
from tandem.config.settings import ProcessSettings, ServerSettings, Settings
from tandem.errors import ConfigError
from tandem.processes.child import ChildProcess
from tandem.protocol.payloads import ApiPayload
from tandem.server.api_process import _report, engine_endpoint
from tandem.server.listener import listen

CHILD = """
import sys
from tandem import log
from tandem.config.settings import ProcessSettings, ServerSettings, Settings
from tandem.server.engines.router import Router
from tandem.server.engines.replicas import Replicas
from tandem.server.api_process import engine_endpoint, run_api
log.set_up("INFO")
endpoint, port, fd, drain = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
settings = Settings(
    server=ServerSettings(port=port), process=ProcessSettings(engine_socket=endpoint, drain_timeout=drain)
)
run_api(settings, Replicas(Router(), {0: engine_endpoint(settings)}), fd=fd if fd >= 0 else None)
print("ended in good order", file=sys.stderr)
"""


class Child:
    """The api in a process of its own."""

    def __init__(self, engine, *, fd=-1, port=0, drain=5.0):
        command = [sys.executable, "-W", "error", "-c", CHILD, engine.path, str(port), str(fd), str(drain)]
        environment = env.child_environment({"PYTHONPATH": ":".join(filter(None, sys.path))})
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, pass_fds=[fd] if fd >= 0 else [], env=environment
        )
        self.log = ""
        while "Uvicorn running on http://" not in self.log:
            line = self.process.stderr.readline()
            assert line, self.log
            self.log += line
        url = self.log.split("Uvicorn running on ")[1].split()[0]
        self.http = httpx.Client(base_url=url, timeout=240, trust_env=False)

    def wait(self):
        self.log += self.process.communicate(timeout=240)[1]
        return self.process.returncode

    def close(self):
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def run(engine):
    children = []

    def start(**options):
        child = Child(engine, **options)
        children.append(child)
        return child

    yield start
    for child in children:
        child.close()


def chat(child, **fields):
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return child.http.post("/v1/chat/completions", json=body)


def ready(child):
    try:
        return child.http.get("/health/ready").status_code == 200
    except httpx.TransportError:  # it ends just now
        return False


@pytest.mark.slow
def test_inherited_socket_and_drain(engine, run, wait_until):
    listener = socket.create_server(("127.0.0.1", 0))
    child = run(fd=listener.fileno())
    listener.close()
    wait_until(lambda: ready(child))
    engine.delay = 0.1
    results = []
    thread = threading.Thread(target=lambda: results.append(chat(child, stream=True)))
    thread.start()
    wait_until(lambda: engine.submitted)
    child.process.send_signal(signal.SIGTERM)
    wait_until(lambda: not ready(child))
    refused = chat(child)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "shutting_down"
    thread.join(240)
    text = "".join(
        json.loads(line.removeprefix("data: "))["choices"][0]["delta"].get("content", "")
        for line in results[0].text.split("\n\n")
        if line.startswith("data: {")
    )
    assert text == engine.text()
    assert child.wait() == 0
    assert "Received SIGTERM: draining 1 running requests" in child.log and "ended in good order" in child.log
    assert "Traceback" not in child.log
    wait_until(lambda: engine.detached == 1)


@pytest.mark.slow
def test_drain_timeout_and_second_signal(engine, run, wait_until):
    for drain, signals in ((0.5, 1), (600, 2)):
        engine.hold = True
        engine.submitted.clear()
        child = run(drain=drain)
        wait_until(lambda child=child: ready(child))
        results = []
        thread = threading.Thread(target=lambda child=child, results=results: results.append(chat(child)))
        thread.start()
        wait_until(lambda: engine.submitted)
        for _ in range(signals):
            child.process.send_signal(signal.SIGTERM)
            wait_until(lambda child=child: child.process.poll() is not None or not ready(child))
        assert child.wait() == 0
        thread.join(240)
        assert results[0].status_code == 503
        assert "Traceback" not in child.log


def test_a_name_of_both_families_is_listened_on_where_all_clients_look(monkeypatch):
    """macOS lists ::1 first for localhost."""
    there = socket.getaddrinfo

    def system(host, port, *words, **how):
        return (
            [*there("::1", port, **how), *there("127.0.0.1", port, **how)]
            if host == "localhost"
            else there(host, port, *words, **how)
        )

    monkeypatch.setattr(socket, "getaddrinfo", system)
    with listen("localhost", 0) as listener:
        assert listener.getsockname()[0] == "127.0.0.1"
    with listen("::1", 0) as listener:
        assert listener.getsockname()[0] == "::1"


def test_address_in_use():
    with listen("127.0.0.1", 0) as taken, pytest.raises(ConfigError, match="cannot listen there"):
        listen("127.0.0.1", taken.getsockname()[1])
    with pytest.raises(ConfigError, match="--host"):
        listen("256.1.1.1", 0)


def test_endpoint_of_the_engine(tmp_path):
    settings = Settings(process=ProcessSettings(engine_socket="/run/x.sock"))
    assert engine_endpoint(settings) == "ipc:///run/x.sock"
    assert engine_endpoint(Settings(server=ServerSettings(port=8123))).endswith("engine-8123.sock")


@contextmanager
def next_api(**server):
    """The child of `tandem serve` that follows an api that has served: its address, and what it says last."""
    words, end = os.pipe()
    with listen("127.0.0.1", 0) as listener, os.fdopen(words, "rb") as said:
        payload = msgspec.json.encode(
            ApiPayload(keys={}, settings=msgspec.Raw(to_json(Settings(server=ServerSettings(**server)))))
        )
        child = ChildProcess(
            "tandem.cli.processes",
            payload,
            env=env.child_environment(),
            name="api",
            pass_fds=[end, listener.fileno()],
            arguments=("api", str(end), str(listener.fileno()), "240"),
        )
        os.close(end)
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=url, timeout=240, trust_env=False) as client:
                yield client, said
        finally:
            child.terminate()
            assert child.wait(240)


def test_what_an_api_cannot_use_is_told_to_its_clients_until_the_next_one(tmp_path):
    (tmp_path / "file").touch()
    with next_api(journal=str(tmp_path / "file")) as (client, said):
        refused = client.post("/v1/chat/completions", json={})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "settings_unusable")
        health = client.get("/health")
        assert health.status_code == 503 and "--journal" in health.json()["detail"]
        assert str(tmp_path) not in health.text + refused.text
        assert client.get("/health/live").status_code == 200
        assert "cannot use" in os.read(said.fileno(), 4096).decode()


def test_prompts_to_warm_that_are_gone_keep_no_later_api_from_serving(tmp_path):
    with next_api(warmup_prompts=(str(tmp_path / "gone.txt"),)) as (client, _):
        assert client.get("/health").json()["status"] == "unreachable", "only the engine is missing"


def test_what_a_callback_of_the_loop_raises_is_logged_once(caplog):
    words = "-".join(("a", "prompt"))

    def fail():
        raise ValueError(words)

    async def scene():
        asyncio.get_running_loop().set_exception_handler(_report)
        for _ in range(20):
            asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0.05)

    asyncio.run(scene())
    [record] = caplog.records
    assert "ValueError" in record.getMessage()
    assert words not in record.getMessage()
