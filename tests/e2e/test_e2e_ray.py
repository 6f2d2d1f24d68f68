"""`tandem serve --launcher ray` on real clusters: several raylets on this machine, each with an address of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI, OpenAIError

from netns import share_kernels
from served import READY, wait_until
from tandem import LLM, SamplingParams
from tandem.errors import UsageError
from tandem.launchers.process_groups import free_ports
from tandem.launchers.ray import driver as ray_driver
from tandem.testing import tiny_model

pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="needs addresses 127.0.0.x")]

SECRET = "a-key-that-ranks-never-see"
PROMPT = "once upon a time"
TOKENS = 400
"""So many that a node can be killed long before the last of them."""
HEAD = "127.0.0.2"
START_S = 240.0


class Cluster:
    """Raylets on this machine, each as a `ray start --block`."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="tdray-", dir="/tmp"))  # sockets there have long names
        share_kernels(self.directory)
        [port] = free_ports(1)
        self.address = f"{HEAD}:{port}"
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}

    def environment(self, **changes: str) -> dict[str, str]:
        return {
            **os.environ,
            "HOME": str(self.directory),
            "TMPDIR": str(self.directory),
            "TANDEM_API_KEY": SECRET,
            "TANDEM_RUNTIME_DIR": str(self.directory / "run"),
            "OPENBLAS_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "PYTHONUNBUFFERED": "1",
            **changes,
        }

    def add(self, address: str, resources: dict[str, float], gpus: int = 0) -> None:
        """Start a node; the first is the head."""
        where = (
            [f"--address={self.address}"]
            if self.nodes
            else ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false"]
        )
        command = [
            sys.executable,
            "-c",
            "from ray.scripts.scripts import main; main()",
            "start",
            "--block",
            *where,
            f"--node-ip-address={address}",
            f"--resources={json.dumps(resources)}",
            "--num-cpus=1",
            f"--num-gpus={gpus}",
            "--object-store-memory=80000000",
            "--min-worker-port=0",
            "--max-worker-port=0",
        ]
        log = self.directory / f"{address}.log"
        environment = self.environment()
        del environment["TANDEM_API_KEY"]
        for _ in range(5):  # Ray gives its own start 30 s, and a busy machine may need more
            with log.open("wb") as output:
                self.nodes[address] = subprocess.Popen(
                    command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
                )
            wait_until(lambda: "Ray runtime started" in log.read_text() or self.nodes[address].poll() is not None)
            if self.nodes[address].poll() is None:
                return
        raise AssertionError(log.read_text())

    def kill(self, address: str) -> None:
        """End a node and all that runs on it, as a power cut does."""
        node = self.nodes.pop(address)
        if node.poll() is not None:
            return
        family = [psutil.Process(node.pid), *psutil.Process(node.pid).children(recursive=True)]
        for stroke in (psutil.Process.suspend, psutil.Process.kill):
            for process in family:
                with suppress(psutil.NoSuchProcess):
                    stroke(process)
        node.wait()
        psutil.wait_procs(family, timeout=240)

    def close(self) -> None:
        for address in reversed(list(self.nodes)):
            self.kill(address)
        shutil.rmtree(self.directory, ignore_errors=True)


class Server:
    """A `tandem serve` on a cluster; what it writes is in `log`."""

    def __init__(self, cluster: Cluster, *arguments: str, **changes: str) -> None:
        self.cluster = cluster
        self._file = cluster.directory / f"serve-{time.monotonic_ns()}.log"
        command = [
            sys.executable,
            "-m",
            "tandem",
            "serve",
            *arguments,
            "--launcher",
            "ray",
            "--port",
            "0",
            "--threads-per-rank",
            "1",
        ]
        with self._file.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=output, env=cluster.environment(**{"RAY_ADDRESS": cluster.address, **changes})
            )

    @property
    def log(self) -> str:
        return self._file.read_text()

    @property
    def url(self) -> str:
        ready = READY.search(self.log)
        assert ready, self.log
        return ready[1]

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key=SECRET, max_retries=0, timeout=240)

    def wait(self) -> None:
        wait_until(lambda: READY.search(self.log) is not None or self.process.poll() is not None)
        assert self.process.poll() is None, self.log

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=240, headers={"Authorization": f"Bearer {SECRET}"}).json()

    def stream(self, on_text: Callable[[], None] = lambda: None) -> str:
        """A greedy answer; `on_text` is called at its first piece."""
        text = ""
        for chunk in self.client.completions.create(
            model="default", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
        ):
            if not text:
                on_text()
            text += chunk.choices[0].text
        return text

    def replica(self, *arguments: str) -> None:
        subprocess.run(
            [sys.executable, "-m", "tandem", "replica", *arguments, "--port", self.url.rpartition(":")[2]],
            timeout=START_S,
            check=True,
            env=self.cluster.environment(),
            capture_output=True,
        )

    def ranks(self) -> list[psutil.Process]:
        """Rank hosts and ranks of this cluster's machines, wherever they hang."""
        return [one for one in processes_of(self.cluster) if {"rank-host", "tandem.executors.worker"} & set(words(one))]

    def end(self, number: int = signal.SIGINT, timeout: float = START_S) -> int:
        """Signal it; then nothing of it may be left, but for the cluster."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), *self.ranks()]
        self.process.send_signal(number)
        code = self.process.wait(timeout)
        _, alive = psutil.wait_procs(family, timeout=240)
        assert not alive, f"left behind: {alive}\n{self.log}"
        return code


def words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def processes_of(cluster: Cluster) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(cluster.directory):
                found.append(process)
        except psutil.Error:
            continue
    return found


@contextmanager
def serving(cluster: Cluster, *arguments: str, **changes: str) -> Iterator[Server]:
    server = Server(cluster, *arguments, **changes)
    try:
        server.wait()
        yield server
        if server.process.poll() is None:
            assert server.end() == 0
    finally:
        if server.process.poll() is None:
            server.process.kill()
            server.process.wait()


def refused(cluster: Cluster, *arguments: str, **changes: str) -> str:
    """The one line with which a server refuses to start, in seconds."""
    server = Server(cluster, *arguments, **changes)
    try:
        assert server.process.wait(240) == 2, server.log
    finally:
        server.process.kill()
    assert "Traceback" not in server.log
    [line] = [line for line in server.log.splitlines() if line.startswith("tandem: ")]
    return line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def expected(model: str) -> str:
    with LLM(model) as llm:
        return llm.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True))[0].text


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Two nodes of one device each. Tests that add a node take it away."""
    made = Cluster()
    try:
        made.add(HEAD, {"mlx": 1})
        made.add("127.0.0.3", {"mlx": 1})
        yield made
    finally:
        made.close()


def test_a_pipeline_over_two_nodes(cluster: Cluster, model: str, expected: str) -> None:
    with serving(cluster, model, "-pp", "2", TANDEM_API_KEY=SECRET) as server:
        assert server.stream() == expected
        assert len(server.get("/health")["ranks"]) == 2
        assert f"ranks go to Ray nodes {HEAD}" in server.log
        assert re.search(r"^\[127\.0\.0\.3.*\[Rank 1\]", server.log, re.M), "ranks' logs come with their node"
        assert not re.search("usage stats|raylet\\)|dashboard|ray::", server.log), "Ray is quiet"
        ranks = server.ranks()
        assert len(ranks) == 4
        for process in ranks:
            assert SECRET not in process.environ().values() and SECRET not in process.cmdline()


def test_a_killed_server_leaves_nothing_and_frees_the_devices(cluster: Cluster, model: str, expected: str) -> None:
    with serving(cluster, model, "-tp", "2") as server:
        assert server.stream() == expected
        assert re.search(r"^\[127\.0\.0\.3.*\[Rank 1\].* part 2/2", server.log, re.M)
        server.end(signal.SIGKILL)
    # Ray notices after a while that nobody has them any more.
    wait_until(lambda: "has 2, 2 of them free" in refused(cluster, model, "-pp", "3"))


SIGTERM = """
import os, ray, signal, sys
from tandem.launchers.ray.driver import sigterm_kept
heard = []
signal.signal(signal.SIGTERM, lambda *args: heard.append("heard"))
with sigterm_kept():
    ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)
os.kill(os.getpid(), signal.SIGTERM)
print(*heard, signal.getitimer(signal.ITIMER_REAL)[0])
"""
"""Ray's handler of SIGTERM ends the process, and sets an alarm that aborts it."""


def test_sigterm_does_what_it_did_before_ray(cluster: Cluster) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SIGTERM, cluster.address],
        capture_output=True,
        text=True,
        timeout=START_S,
        env=cluster.environment(),
        cwd="/",
    )
    assert done.stdout.split() == ["heard", "0.0"], done.stderr


def test_replicas_spread_and_a_later_node_carries_another(cluster: Cluster, model: str, expected: str) -> None:
    with serving(cluster, model, "-dp", "2") as server:
        nodes = re.findall(r"ranks go to Ray nodes (\S+)", server.log)
        assert sorted(nodes) == [HEAD, "127.0.0.3"]
        server.replica("add")
        wait_until(lambda: "Replica 2 cannot start" in server.log)
        assert "1 rank(s) need a device each" in server.log
        cluster.add("127.0.0.4", {"accelerator_type:M4-Max": 1}, gpus=1)  # what Ray says of a Mac by itself
        try:
            server.replica("add")
            wait_until(lambda: [one["state"] for one in server.get("/health")["replicas"]] == ["ready"] * 3)
            assert "ranks go to Ray nodes 127.0.0.4" in server.log
            assert server.stream() == expected
        finally:
            cluster.kill("127.0.0.4")


def test_an_address_that_is_not_the_nodes_is_named(cluster: Cluster, model: str) -> None:
    line = refused(cluster, model, "-pp", "2", "--head-address", "127.0.0.9")
    assert "--head-address 127.0.0.9" in line and f"advertises {HEAD}" in line


def test_an_address_where_no_head_is_is_named(cluster: Cluster, model: str) -> None:
    [closed] = free_ports(1)
    assert "nothing answers there" in refused(cluster, model, RAY_ADDRESS=f"{HEAD}:{closed}")
    assert "must be HOST:PORT" in refused(cluster, model, "--ray-address", "ray://10.0.0.1:10001")


def test_something_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_driver, "CONNECT_S", 3.0)
    with socket.create_server((HEAD, 0)) as silent:
        address = f"{HEAD}:{silent.getsockname()[1]}"
        driver = ray_driver.RayDriver(address, 0, lambda news: None)
        try:
            with pytest.raises(UsageError, match=f"no Ray head has answered at {address}"):
                driver.connect()
        finally:
            driver.close()


def test_a_cluster_of_its_own_serves_and_ends_with_it(cluster: Cluster, model: str, expected: str, tmp_path: Path) -> None:
    before = {process.pid for process in processes_of(cluster)}
    with serving(cluster, model, "-dp", "2", "--ray-address", "new", HOME=str(tmp_path)) as server:
        assert server.stream() == expected
    wait_until(lambda: {process.pid for process in processes_of(cluster)} <= before)


def test_a_node_that_is_lost_ends_the_server_where_no_other_has_room(cluster: Cluster, model: str) -> None:
    """The last one: it uses the cluster up. test_e2e_ray_machines.py has a node with another that has room."""
    with serving(cluster, model, "-pp", "2", "--max-restarts", "1", "--rejoin-timeout", "20") as server:
        assert f"ranks go to Ray nodes {HEAD} ({socket.gethostname()}), 127.0.0.3" in server.log
        with pytest.raises(OpenAIError):
            server.stream(lambda: cluster.kill("127.0.0.3"))
        assert server.process.wait(240) == 3
        assert re.search("gave up .*: 2 rank\\(s\\) need a device each.* has 1, .*127.0.0.3 .*is lost", server.log)
