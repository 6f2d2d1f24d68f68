"""A real `tandem serve` whose processes can be hurt, and requests whose undisturbed answers are known."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import served as served_by
from served import PATIENCE_S, Call, address, assert_gone, end, holds, start
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


def same(got: dict[str, Any], expected: dict[str, Any]) -> bool:
    """Equal answers; log probabilities as close as float32 allows."""
    mine, theirs = got.get("logprobs", []), expected.get("logprobs", [])
    close = len(mine) == len(theirs) and all(abs(a - b) < 1e-3 for a, b in zip(mine, theirs, strict=True))
    return close and {**got, "logprobs": 0} == {**expected, "logprobs": 0}


class Server(served_by.Server):
    """A running `tandem serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        super().__init__(process, url)
        self.log, self.layout = log, ""
        self.expected: list[dict[str, Any]] = []

    # --- requests ---

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

    def processes(self, *words: str) -> list[psutil.Process]:
        """Descendants whose command line has all of `words`, oldest first."""
        found = []
        for one in self.family():
            with suppress(psutil.NoSuchProcess):
                if set(words) <= set(one.cmdline()):
                    found.append(one)
        return sorted(found, key=lambda one: one.pid)

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
            text = self.metrics()
            return "\ntandem_gang_restarts_total" in text

        self.wait(told, "the engine's metrics")
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    def tail(self) -> str:
        """The end of its log, for messages."""
        return self.log.read_text()[-6000:]

    def wait(self, condition: Callable[[], bool], what: str = "", seconds: float = PATIENCE_S) -> float:
        """Until `condition` holds; returns the seconds that it took."""
        started = time.monotonic()
        while not holds(condition):
            assert time.monotonic() < started + seconds, f"timed out: {what}\n{self.tail()}"
            assert self.process.poll() is None, f"the server ended\n{self.tail()}"
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
        server.layout = request.param
        server.learn()
        yield server
