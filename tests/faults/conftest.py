"""A real `tandem serve` whose processes can be hurt, and requests whose undisturbed answers are known."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from served import PATIENCE_S, TLS, address, assert_gone, end, start
from tandem.testing import tiny_model

FLAGS = ("--prefill-chunk", "8", "--prefix-cache", "0", "--start-timeout", "120", "--max-restarts", "100")
LAYOUTS = {"pp": ("-pp", "2"), "tp": ("-tp", "2"), "dp": ("-dp", "2"), "one": ()}

LONG = [*range(10, 500), *range(10, 410)]
"""A prompt of 890 tokens, which takes 112 steps."""
MIX: list[dict[str, Any]] = [
    {"prompt": [7, 8, 9], "max_tokens": 120, "temperature": 0, "stream": True, "logprobs": 2},
    {
        "prompt": [11, 12],
        "max_tokens": 120,
        "temperature": 1.0,
        "seed": 5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "top_p": 0.9,
        "stream": True,
    },
    {"prompt": [21, 22, 23, 24], "max_tokens": 80, "temperature": 0, "min_tokens": 60},
    {"prompt": LONG, "max_tokens": 8, "temperature": 0, "stream": True},
]


class Call:
    """One HTTP request in a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.chunks = 0
        self.result: dict[str, Any] = {}
        self.error: Exception | None = None
        self.status = 0
        self._url, self._body = url, {"model": "default", "ignore_eos": True, **body}
        if body.get("stream"):
            self._body["stream_options"] = {"include_usage": True}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.Client(timeout=PATIENCE_S, verify=TLS) as client:
                if self._body.get("stream"):
                    self._stream(client)
                else:
                    reply = client.post(f"{self._url}/v1/completions", json=self._body)
                    self.status = reply.status_code
                    if reply.status_code == 200:
                        whole = reply.json()
                        self._add(whole)
                        self.result["usage"] = whole["usage"]
                    else:
                        self.result = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            self.error = error

    def _stream(self, client: httpx.Client) -> None:
        import json

        with client.stream("POST", f"{self._url}/v1/completions", json=self._body) as reply:
            self.status = reply.status_code
            for line in reply.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    self.result["done"] = True
                    break
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self.result["error"] = chunk["error"]
                elif chunk.get("choices"):
                    self._add(chunk)
                if chunk.get("usage"):
                    self.result["usage"] = chunk["usage"]

    def _add(self, reply: dict[str, Any]) -> None:
        self.chunks += 1
        [choice] = reply["choices"]
        self.result["text"] = self.result.get("text", "") + choice["text"]
        if choice.get("logprobs"):
            self.result.setdefault("logprobs", []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"]:
            self.result["finish_reason"] = choice["finish_reason"]

    @property
    def running(self) -> bool:
        """No answer yet, or not all of it."""
        return self._thread.is_alive()

    def join(self) -> Call:
        """Wait for its end."""
        self._thread.join(PATIENCE_S)
        assert not self.running, f"no end of {self._body}"
        return self


def same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Equal answers; log probabilities as close as float32 allows."""
    mine, theirs = got.get("logprobs", []), expected.get("logprobs", [])
    close = len(mine) == len(theirs) and all(abs(a - b) < 1e-3 for a, b in zip(mine, theirs, strict=True))
    return close and {**got, "logprobs": 0} == {**expected, "logprobs": 0}


class Server:
    """A running `tandem serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self.expected: list[dict[str, Any]] = []

    # --- requests ---

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=240, verify=TLS).json()

    def call(self, body: dict[str, Any]) -> Call:
        return Call(self.url, body)

    def load(self) -> list[Call]:
        """Start all of `MIX`: the server has those that still run."""
        calls = [self.call(body) for body in MIX]
        self.wait(lambda: sum(call.running for call in calls) <= len(self.get("/v1/status")["requests"]), "arrivals")
        return calls

    def learn(self) -> None:
        """Note the undisturbed answers of `MIX`, each alone."""
        self.expected = [self.call(body).join().result for body in MIX]
        assert all(one.get("finish_reason") == "length" for one in self.expected), f"{self.expected}\n{self.tail()}"

    def check(self, calls: list[Call]) -> None:
        """Each of `load`'s answers must be the undisturbed one."""
        for number, (call, expected) in enumerate(zip(calls, self.expected, strict=True)):
            self.wait(lambda call=call: not call.running, f"the end of request {number}")
            assert call.error is None, f"request {number}: {call.error!r}\n{self.tail()}"
            assert same(call.result, expected), f"request {number}:\n{call.result}\n{expected}\n{self.tail()}"

    # --- processes ---

    def family(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def processes(self, *words: str) -> list[psutil.Process]:
        """Descendants whose command line has all of `words`, oldest first."""
        found = []
        for one in self.family():
            with suppress(psutil.NoSuchProcess):
                if set(words) <= set(one.cmdline()):
                    found.append(one)
        return sorted(found, key=lambda one: one.pid)

    def api(self) -> psutil.Process:
        [found] = self.processes("tandem.cli.processes", "api")
        return found

    def engines(self) -> list[psutil.Process]:
        return self.processes("tandem.cli.processes", "engine")

    def ranks(self) -> list[int]:
        """Process ids of the ranks, in their order."""
        return [rank["pid"] for rank in self.get("/health")["ranks"]]

    def states(self) -> list[str]:
        with suppress(httpx.HTTPError, ValueError):
            return [one["state"] for one in self.get("/health")["replicas"]]
        return []

    def settled(self, replicas: int = 1) -> bool:
        """All replicas serve."""
        return self.states() == ["ready"] * replicas

    def metric(self, name: str) -> float:
        """Sum of a metric's samples whose name and labels begin like `name`."""
        text = ""

        def told() -> bool:
            """Those of a busy engine, which is not waited for, may be missing."""
            nonlocal text
            text = httpx.get(f"{self.url}/metrics", timeout=240, verify=TLS).text
            return "\ntandem_gang_restarts_total" in text

        self.wait(told, "the engine's metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def tail(self) -> str:
        """The end of its log, for messages."""
        return self.log.read_text()[-6000:]

    def wait(self, condition: Callable[[], bool], what: str = "", seconds: float = PATIENCE_S) -> float:
        """Until `condition` holds; returns the seconds that it took."""
        started = time.monotonic()
        while not condition():
            assert time.monotonic() < started + seconds, f"timed out: {what}\n{self.tail()}"
            assert self.process.poll() is None, f"the server ended\n{self.tail()}"
            time.sleep(0.02)
        return time.monotonic() - started


def free(port: int) -> bool:
    """Nobody listens on the port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@contextmanager
def running_server(*arguments: str) -> Iterator[Server]:
    """A server in a runtime directory of its own; afterwards there must be nothing left of it."""
    runtime = Path(tempfile.mkdtemp(prefix="tandem-faults-", dir="/tmp"))
    log = runtime / "log"
    with log.open("w") as errors:
        process = start(*arguments, errors=errors, TANDEM_RUNTIME_DIR=str(runtime))
    family: list[psutil.Process] = []
    port = 0
    try:
        server = Server(process, address(process, log), log)
        port = int(server.url.rsplit(":", 1)[1])
        yield server
        family = server.family()
    finally:
        end(process)
    assert_gone(family)
    assert free(port), "the port is still taken"
    left = sorted(path.name for path in runtime.iterdir() if path != log)
    assert not left, f"left behind: {left}"
    shutil.rmtree(runtime)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny, random, float32: greedy texts are the same in every layout and after every replay."""
    return tiny_model(tmp_path_factory.mktemp("model"), dtype="float32", layers=2, config={"max_position_embeddings": 1024})


@pytest.fixture(scope="session")
def make_server() -> type[Server]:
    """For servers that a test starts itself."""
    return Server


@pytest.fixture(scope="session")
def running() -> Callable[..., AbstractContextManager[Server]]:
    """`running(*arguments)` is a server as a context manager."""
    return running_server


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, model: Path) -> Iterator[Server]:
    """One server of the layout that the test's parameter names, for all of its faults."""
    with running_server(str(model), *LAYOUTS[request.param], *FLAGS) as server:
        server.learn()
        yield server
