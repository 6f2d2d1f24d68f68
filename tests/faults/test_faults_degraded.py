"""A machine that stays away: the model is served from what remains, and from all again when it is back."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def token(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "token"


class Joined:
    """`tandem rank` processes of this machine, each in the place of a machine of its own."""

    def __init__(self, port: int, token: Path) -> None:
        self.port, self.token = port, token
        self.hosts: list[subprocess.Popen[bytes]] = []

    def join(self) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "tandem", "rank", "--join", f"127.0.0.1:{self.port}", "--token-file", str(self.token)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.hosts.append(process)
        return process

    def join_when_open(self, count: int) -> None:
        """As soon as somebody listens."""
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    break
            time.sleep(0.1)
        for _ in range(count):
            self.join()

    def end(self) -> None:
        for process in self.hosts:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def machines(token: Path) -> Iterator[Joined]:
    from tandem.launchers.manual import make_token
    from tandem.launchers.process_groups import free_ports

    make_token(str(token))
    joined = Joined(free_ports(1)[0], token)
    yield joined
    joined.end()


@pytest.fixture(scope="module")
def server(model: Path, machines: Joined, running: Any) -> Iterator[Any]:
    threading.Thread(target=machines.join_when_open, args=(2,)).start()
    with running(
        str(model),
        "-pp",
        "2",
        "--launcher",
        "manual",
        "--join-port",
        str(machines.port),
        "--token-file",
        str(machines.token),
        "--rejoin-timeout",
        "2",
        "--head-address",
        "127.0.0.1",
        "--prefill-chunk",
        "8",
        "--prefix-cache",
        "0",
        "--max-restarts",
        "100",
    ) as one:
        one.learn()
        yield one


def test_it_goes_on_with_fewer_and_goes_back(server: Any, machines: Joined) -> None:
    assert server.get("/health")["degraded"] == "" and len(server.ranks()) == 2
    calls = server.load()
    server.wait(lambda: calls[0].chunks > 5, "tokens")
    machines.hosts[1].kill()
    server.check(calls)
    # On a busy machine all may have been answered before; and what /health tells may be a second old.
    server.wait(lambda: server.get("/health")["degraded"] and server.settled() and len(server.ranks()) == 1, "fewer")
    health = server.get("/health")
    assert health["degraded"].startswith("1 of 2 ranks"), health
    assert health["status"] == "healthy" and len(health["ranks"]) == 1
    assert health["ranks"][0]["layers"] == [0, 2]
    assert server.metric("tandem_degraded") == 1
    assert "Degraded: fewer machines serve" in server.log.read_text()

    calls = server.load()
    server.wait(lambda: calls[0].chunks > 5, "tokens")
    machines.join()
    server.wait(lambda: server.get("/health")["degraded"] == "" and server.settled(), "all are back")
    server.check(calls)
    assert [rank["layers"] for rank in server.get("/health")["ranks"]] == [[0, 1], [1, 2]]
    assert server.metric("tandem_degraded") == 0
    server.check(server.load())


def test_a_machine_that_is_back_in_time_is_waited_for(server: Any, machines: Joined) -> None:
    failures = server.metric('tandem_gang_failures_total{cause="host",')
    calls = server.load()
    server.wait(lambda: calls[0].chunks > 5, "tokens")
    threading.Timer(0.2, machines.join).start()
    os.kill(machines.hosts[0].pid, 9)
    server.check(calls)
    server.wait(lambda: server.settled() and len(server.ranks()) == 2, "two ranks")
    if server.metric('tandem_gang_failures_total{cause="host",') == failures:
        assert "Degraded" not in server.log.read_text().rpartition("All machines are back")[2]
