"""`tandem serve --roles prefill,decode` as a user runs it: one replica computes long prompts that go on at another."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import served
from served import Server, wait_until
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
PREFILL, DECODE = 0, 1
LENGTHS = {
    "short": 60,
    "two": 500,
    "long": 800,
    "longer": 1300,
    "rank": 1801,
    "engine": 1802,
    "decode": 900,
    "alone": 600,
    "again": 700,
}
PROMPTS = {name: [random.Random(name).randrange(3, 500) for _ in range(length)] for name, length in LENGTHS.items()}
TOKENS = 48


class Fleet(Server):
    """A server with roles, and what it has on its disk."""

    disk: Path
    log: Path

    def complete(self, name: str) -> Any:
        return self.client.completions.create(
            model="default", prompt=PROMPTS[name], max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True}
        )

    def counted(self, name: str, replica: int | None = None) -> float:
        label = "" if replica is None else f'replica="{replica}"'

        def samples() -> list[str]:
            return [one for one in self.metrics().splitlines() if one.startswith(f"{name}{{") and label in one]

        while not (found := samples()):  # an engine's are left out if it has not told them within two seconds
            assert self.process.poll() is None
        return float(found[0].split()[-1])

    @property
    def handed_over(self) -> float:
        return self.counted("tandem_requests_handed_over_total")

    def replicas(self) -> dict[int, Any]:
        return {one["replica"]: one for one in self.get("/health")["replicas"]}

    def disk_blocks(self) -> int:
        return len(list(self.disk.glob("*/*.kv")))

    def engine(self, replica: int) -> psutil.Process:
        [found] = [one for one in psutil.Process(self.process.pid).children() if one.cmdline()[-3::2] == ["engine", str(replica)]]
        return found

    def all_ready(self) -> bool:
        return all(one["state"] == "ready" for one in self.replicas().values())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It computes much more slowly than a disk reads."""
    return tiny_model(
        tmp_path_factory.mktemp("roles") / "model",
        dtype="float32",
        config={"max_position_embeddings": 8192, "intermediate_size": 1536},
    )


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, str]:
    """What one process says."""
    params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True)
    with LLM(str(model), kv_tokens=60_000) as llm:
        return {name: found.text for name, found in zip(PROMPTS, llm.generate(list(PROMPTS.values()), params), strict=True)}


@pytest.fixture(scope="module")
def fleet(model: Path, expected: dict[str, str]) -> Iterator[Fleet]:
    disk, log = model.parent / "kv", model.parent / "log"
    with (
        log.open("w") as errors,
        served.serving(
            model,
            "-dp",
            "2",
            "--roles",
            "prefill,decode",
            "--kv-disk",
            disk,
            "--kv-tokens",
            "60000",
            "--executor",
            "cluster",
            "--prefill-chunk",
            "64",
            kind=Fleet,
            errors=errors,
        ) as server,
    ):
        server.disk, server.log = disk, log
        yield server


def test_answers_are_those_without_roles_and_each_replica_does_its_own(fleet: Fleet, expected: dict[str, str]) -> None:
    assert fleet.complete("short").choices[0].text == expected["short"]
    assert fleet.complete("two").choices[0].text == expected["two"]
    assert fleet.handed_over == 0 == fleet.counted("tandem_prompt_tokens_total", PREFILL)
    names = [*("long", "longer") * 2, *("short", "two") * 2]
    with ThreadPoolExecutor(len(names)) as pool:
        answers = list(pool.map(fleet.complete, names))
    assert [one.choices[0].text for one in answers] == [expected[name] for name in names]
    assert all(one.usage.completion_tokens == TOKENS for one in answers)
    assert 1 <= fleet.handed_over <= 4  # some may be computed where they are answered, if too much waits
    assert fleet.counted("tandem_kv_disk_hit_tokens_total", DECODE) >= 512, "it read what the other had computed"
    before = fleet.handed_over
    again = fleet.complete("longer")
    assert again.choices[0].text == expected["longer"] and fleet.handed_over == before
    assert again.usage.prompt_tokens_details.cached_tokens >= 1280, "it is in the memory of whoever decoded it"
    assert fleet.counted("tandem_requests_moved_total") == 0
    assert "goes on at replica" not in fleet.log.read_text(), "it is what roles are for"


def test_what_stays_is_answered_too(fleet: Fleet) -> None:
    before = fleet.handed_over, fleet.disk_blocks()
    found = fleet.client.completions.create(
        model="default", prompt=PROMPTS["alone"], max_tokens=3, echo=True, logprobs=1
    ).choices[0]
    assert found.logprobs is not None and len(found.logprobs.token_logprobs) == len(PROMPTS["alone"]) + 3
    secret = [5, *PROMPTS["alone"]]
    answer = fleet.client.completions.create(
        model="default", prompt=secret, max_tokens=3, extra_body={"prompt_cache_retention": "in_memory"}
    )
    assert answer.usage.completion_tokens == 3
    assert fleet.client.embeddings.create(model="default", input=PROMPTS["alone"]).data[0].embedding
    assert fleet.handed_over == before[0]


def test_roles_are_shown(fleet: Fleet) -> None:
    assert {number: one["role"] for number, one in fleet.replicas().items()} == {0: "prefill", 1: "decode"}
    listed = fleet.command("replica", "list", "--port", fleet.port).stdout.splitlines()
    assert listed[0].split()[:3] == ["replica", "role", "state"]
    assert [line.split()[:3] for line in listed[1:]] == [["0", "prefill", "ready"], ["1", "decode", "ready"]]
    [look] = json.loads(fleet.command("status", "--port", fleet.port, "--interval", "0", "--json").stdout)
    assert [one["role"] for one in look["replicas"]] == ["prefill", "decode"]


@pytest.mark.parametrize("who", ["rank", "engine"])
def test_what_dies_in_the_middle_of_a_prompt_costs_a_pause(fleet: Fleet, expected: dict[str, str], who: str) -> None:
    wait_until(fleet.all_ready)
    before, read = fleet.disk_blocks(), fleet.counted("tandem_kv_disk_hit_tokens_total", DECODE)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(fleet.complete, who)
        wait_until(lambda: fleet.disk_blocks() >= before + 12, "disk blocks are written while the prompt is computed")
        if who == "engine":
            fleet.engine(PREFILL).kill()
        else:
            os.kill(next(one["pid"] for one in fleet.get("/health")["ranks"] if one["replica"] == PREFILL), signal.SIGKILL)
        assert answer.result().choices[0].text == expected[who]
    assert fleet.counted("tandem_kv_disk_hit_tokens_total", DECODE) >= read + 512
    wait_until(fleet.all_ready)


def test_a_stream_whose_replica_dies_goes_on_at_the_one_for_prompts(fleet: Fleet, expected: dict[str, str]) -> None:
    moved, handed = fleet.counted("tandem_requests_moved_total"), fleet.handed_over
    with fleet.client.completions.create(
        model="default", prompt=PROMPTS["decode"], max_tokens=5000, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        text = next(stream).choices[0].text
        wait_until(lambda: fleet.handed_over > handed and fleet.replicas()[DECODE]["running"])
        fleet.engine(DECODE).kill()
        wait_until(lambda: fleet.counted("tandem_requests_moved_total") > moved)
        while len(text) < len(expected["decode"]):
            text += next(stream).choices[0].text
    assert text.startswith(expected["decode"])
    wait_until(fleet.all_ready)


def test_roles_come_and_go_while_it_serves(fleet: Fleet, expected: dict[str, str]) -> None:
    command = partial(fleet.command, "replica")
    handed = fleet.handed_over
    assert command("drain", str(PREFILL), "--port", fleet.port).returncode == 0
    wait_until(lambda: PREFILL not in fleet.replicas())
    assert fleet.complete("alone").choices[0].text == expected["alone"] and fleet.handed_over == handed
    assert command("add", "--role", "prefill", "--port", fleet.port).returncode == 0
    wait_until(lambda: len(fleet.replicas()) == 2 and fleet.all_ready())
    assert [one["role"] for one in fleet.replicas().values()] == ["decode", "prefill"]
    assert fleet.complete("again").choices[0].text == expected["again"] and fleet.handed_over == handed + 1
    wrong = command("add", "--role", "reader", "--port", fleet.port)
    assert wrong.returncode == 2 and "decode" in wrong.stderr and "Traceback" not in wrong.stderr


def test_a_model_whose_caches_stay_where_they_are_is_refused_with_code_2_and_a_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tandem",
            "serve",
            tiny_model(tmp_path, "longcat_flash_ngram"),
            "--port",
            "0",
            "-dp",
            "2",
            "--roles",
            "prefill,decode",
            "--kv-disk",
            tmp_path / "kv",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 2 and "longcat_flash_ngram has caches of a kind that does not go" in done.stderr
    assert "Traceback" not in done.stderr
