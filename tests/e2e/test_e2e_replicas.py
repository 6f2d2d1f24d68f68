"""`tandem serve --data-parallel-size N` as a user runs it: spreading, affinity, loss, joining and leaving."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

import served
from served import Server, assert_gone, end, start, wait_until
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
LONG = {"max_tokens": 300, "temperature": 0, "extra_body": {"ignore_eos": True}}


class Replicas(Server):
    """A running `tandem serve` with several engines."""

    def replicas(self) -> dict[int, Any]:
        return {one["replica"]: one for one in self.get("/health")["replicas"]}

    def complete(self, prompt: str, **options: Any) -> str:
        return self.client.completions.create(model="default", prompt=prompt, **{**LONG, **options}).choices[0].text

    def engine(self, replica: int) -> psutil.Process:
        [found] = [one for one in psutil.Process(self.process.pid).children() if one.cmdline()[-3::2] == ["engine", str(replica)]]
        return found

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return super().command("replica", *arguments, "--port", self.port)

    def counted(self, name: str) -> dict[str, float]:
        """A counter by replica."""
        found = re.findall(rf'^{name}{{model="[^"]*",replica="(\d+)"}} (\S+)$', self.metrics(), re.M)
        return {label: float(value) for label, value in found}

    def moved(self) -> float:
        """Requests that went on elsewhere."""
        return float(re.findall(r"^tandem_requests_moved_total\S+ (\S+)$", self.metrics(), re.M)[0])


serving = partial(served.serving, kind=Replicas, how=signal.SIGINT)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    with serving(str(tiny_model(tmp_path_factory.mktemp("tiny"))), "-dp", "2") as server:
        yield server


def test_both_are_seen(two: Replicas) -> None:
    health = two.get("/health")
    assert health["world_size"] == 2 and sorted(rank["replica"] for rank in health["ranks"]) == [0, 1]
    assert [one["state"] for one in health["replicas"]] == ["ready", "ready"]
    assert two.get("/v1/status")["engine"]["kv_tokens_total"] == sum(one["kv_tokens_total"] for one in health["replicas"])
    assert set(two.counted("tandem_generation_tokens_total")) == {"0", "1"}


def test_log_probabilities_of_a_prompt_are_the_same_from_either_and_again_when_one_is_killed(two: Replicas) -> None:
    prompt = [3 + i * 7 % 400 for i in range(250)]

    def asked(_: int = 0) -> list[Any]:
        answer = two.client.completions.create(model="default", prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        return answer.choices[0].logprobs.token_logprobs

    expected = asked()
    assert expected[0] is None and len(expected) == 250 and all(value < 0 for value in expected[1:])
    with ThreadPoolExecutor(8) as pool:
        answers = [pool.submit(asked, i) for i in range(40)]
        wait_until(
            lambda: any(one["outstanding_tokens"] for one in two.replicas().values()) or all(one.done() for one in answers)
        )
        [victim, *_] = [index for index, one in two.replicas().items() if one["outstanding_tokens"]] or [0]
        engine = two.engine(victim)
        engine.kill()
        assert all(one.result() == [None, *map(near, expected[1:])] for one in answers)
    wait_until(lambda: not engine.is_running() and two.replicas()[victim]["state"] == "ready")


def near(value: float) -> Any:
    return pytest.approx(value, abs=1e-4)


def test_load_spreads(two: Replicas) -> None:
    before = two.counted("tandem_generation_tokens_total")
    threads = [threading.Thread(target=two.complete, args=(f"{i} and so on",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = two.counted("tandem_generation_tokens_total")
    assert {label: after[label] - before[label] for label in after} == {"0": 600, "1": 600}
    wait_until(lambda: all(one["outstanding_tokens"] == 0 for one in two.replicas().values()))


def test_a_prefix_stays_where_it_is_cached(two: Replicas) -> None:
    context = "Some long introduction that every question has. " * 4
    before = two.counted("tandem_prompt_tokens_total")
    cached = []
    for i in range(5):
        reply = two.client.completions.create(model="default", prompt=f"{context}{i}?", max_tokens=2, temperature=0)
        cached.append(reply.usage.prompt_tokens_details.cached_tokens)
    after = two.counted("tandem_prompt_tokens_total")
    assert sorted(after[label] > before[label] for label in after) == [False, True]
    assert cached[0] == 0 and min(cached[1:]) > 60


def test_a_killed_engine_costs_a_stream_a_pause(two: Replicas) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "presence_penalty": 0.5}
    undisturbed = two.complete("go on", **options)
    moved, engines = two.moved(), [two.engine(replica) for replica in (0, 1)]
    stream = two.client.completions.create(
        model="default", prompt="go on", stream=True, stream_options={"include_usage": True}, **{**LONG, **options}
    )
    pieces, victim, usage = [], -1, None
    for i, chunk in enumerate(stream):
        pieces += [choice.text for choice in chunk.choices]
        usage = chunk.usage or usage
        if i == 20:
            [victim] = [index for index, one in two.replicas().items() if one["outstanding_tokens"]]
            engines[victim].kill()
    assert "".join(pieces) == undisturbed
    assert two.moved() == moved + 1, "the engine died too late to matter"
    assert usage is not None and usage.completion_tokens == 300
    wait_until(lambda: not engines[victim].is_running() and two.replicas()[victim]["state"] == "ready")
    assert "restarts" in two.command("list").stdout


def test_join_and_leave_while_serving(two: Replicas) -> None:
    expected = two.complete("and then")
    assert two.command("add").stdout.startswith("replica 2 is starting")
    wait_until(lambda: two.replicas().get(2, {}).get("state") == "ready")
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(two.complete("and then"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    wait_until(lambda: sum(one["outstanding_tokens"] > 0 for one in two.replicas().values()) == 3)
    pid = two.engine(0).pid
    done = two.command("drain", "0")
    assert done.returncode == 0, done.stderr
    for thread in threads:
        thread.join()
    assert texts == [expected] * 6
    wait_until(lambda: sorted(two.replicas()) == [1, 2])
    assert not psutil.pid_exists(pid)
    listed = two.command("list").stdout.splitlines()
    assert [line.split()[:2] for line in listed[1:]] == [["1", "ready"], ["2", "ready"]]
    assert two.complete("and then") == expected


def test_what_replica_refuses(two: Replicas) -> None:
    for arguments, words in ((("drain", "9"), "there is no replica 9"), (("drain", "x"), "invalid int")):
        done = two.command(*arguments)
        assert done.returncode == 2 and words in done.stderr and len(done.stderr.splitlines()) == 1
    with socket.socket() as nobody:  # its port is taken, and not listened at
        nobody.bind(("127.0.0.1", 0))
        port = str(nobody.getsockname()[1])
        done = subprocess.run(
            [sys.executable, "-m", "tandem", "replica", "list", "--port", port],
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
    assert done.returncode == 2 and "no server listens" in done.stderr


def test_the_api_can_die_alone(two: Replicas) -> None:
    api = two.api()
    engines = [one.pid for one in psutil.Process(two.process.pid).children() if "engine" in one.cmdline()]
    api.kill()

    def answers() -> bool:
        try:
            return sum(one["state"] == "ready" for one in two.replicas().values()) == 2
        except httpx.HTTPError:
            return False

    wait_until(answers)
    assert two.complete("hello", max_tokens=3)
    assert all(psutil.pid_exists(pid) for pid in engines)


def test_one_replica_may_become_several_and_its_layout_is_kept(tmp_path: Path) -> None:
    with serving(str(tiny_model(tmp_path)), "-pp", "2") as server:
        expected = server.complete("once", max_tokens=20)
        for arguments, words in ((("drain", "0"), "last one"),):
            assert words in server.command(*arguments).stderr
        assert server.command("add").returncode == 0
        wait_until(lambda: server.replicas().get(1, {}).get("state") == "ready")
        health = server.get("/health")
        assert health["world_size"] == 4
        assert sorted((rank["replica"], rank["rank"]) for rank in health["ranks"]) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert server.complete("once", max_tokens=20) == expected
    runtime = os.environ.get("TANDEM_RUNTIME_DIR")
    port = server.url.rsplit(":", 1)[1]
    if runtime:
        assert not list(Path(runtime).glob(f"*-{port}*")), "sockets were left behind"


def test_killing_the_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    process = start(tiny_model(tmp_path), "-dp", "2", "-pp", "2")
    try:
        assert process.stdout is not None
        assert "2 replicas" in process.stdout.readline()
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 7
    finally:
        end(process, signal.SIGKILL)
    assert_gone(family)


def test_what_cannot_be_served_ends_with_code_2_and_a_line(tmp_path: Path) -> None:
    directory = str(tiny_model(tmp_path))
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "serve", directory, "-dp", "2", "-pp", "9", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2 and "pipeline-parallel" in done.stderr and "Traceback" not in done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "tandem", "engine", directory, "-dp", "2"],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2 and "--data-parallel-size 2" in done.stderr
