"""`--kv-disk` over machines of their own, each with its own disk."""

from __future__ import annotations

import json
import os
import queue
import random
import re
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from hosts import Served, eventually, hostfile, serving
from netns import Machines
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
LEFT = "the machine that has it has not sent it|KV disk slower than computing"
"""What ranks say of KV that they do not get, or not soon enough."""
PROMPT = [3 + i * 7 % 400 for i in range(540)]


class Fleet:
    """Replicas of one server, each on a machine of its own with a disk of its own."""

    def __init__(self, server: Served, disks: dict[str, Path]) -> None:
        self.server, self.disks = server, disks

    def counted(self, metric: str) -> dict[str, float]:
        text = httpx.get(f"{self.server.url}/metrics", timeout=240).text
        return {
            index: float(value) for index, value in re.findall(rf'^{metric}{{model="[^"]*",replica="(\d)"}} (\S+)', text, re.M)
        }

    def lent_to_all(self, replicas: int) -> None:
        """Wait until each has been told of all others."""
        heard = rf"\[engine (\d)\].* Remote KV available from {replicas - 1} directories"
        eventually(lambda: len(set(re.findall(heard, self.server.log))) >= replicas, what=lambda: self.server.log)

    def key_of(self, replica: str) -> str:
        """Requests with this key go to that replica while nothing runs."""
        for number in range(1000):
            before = self.counted("tandem_prompt_tokens_total")
            self.server.complete(1, prompt=[5, 6, 7], prompt_cache_key=f"key{number}")
            after = self.counted("tandem_prompt_tokens_total")
            if after[replica] > before[replica]:
                return f"key{number}"
        raise AssertionError(f"no key goes to replica {replica}")

    def ask(self, replica: str, prompt: list[int], tokens: int = 12) -> str:
        return self.server.complete(tokens, prompt=prompt, prompt_cache_key=self.key_of(replica))

    def written(self, machine: str, disk_blocks: int) -> None:
        eventually(lambda: len(list(self.disks[machine].glob("*/*.kv"))) >= disk_blocks, 120)

    @property
    def handed_over(self) -> int:
        text = httpx.get(f"{self.server.url}/metrics", timeout=240).text
        return int(float(re.findall(r"^tandem_requests_handed_over_total\S+ (\S+)", text, re.M)[0]))

    def hands_over(self) -> None:
        """Wait until long prompts go from one to the other."""
        before = self.handed_over

        def one_did() -> bool:
            self.server.complete(200, prompt=random.choices(range(3, 400), k=600))
            return self.handed_over > before

        eventually(one_did, what=lambda: self.server.log)

    def command(self, *arguments: str) -> str:
        words = ["tandem", "replica", *arguments, "--port", "8000"]
        return self.server.machines.run("h0", words, timeout=240).stdout


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """So wide that it pays to fetch, however busy the machine."""
    return str(
        tiny_model(
            tmp_path_factory.mktemp("wide") / "model",
            layers=4,
            dtype="float32",
            config={"max_position_embeddings": 8192, "intermediate_size": 4096},
        )
    )


def disks_of(machines: Machines, directory: Path) -> dict[str, Path]:
    """What each machine has at that path, which is its own."""
    directory.mkdir()
    disks = {name: directory.with_name(name) for name in machines.names}
    for name, disk in disks.items():
        disk.mkdir()
        machines.run(name, ["mount", "--bind", str(disk), str(directory)])
    return disks


def test_replicas_without_a_common_disk_fetch_from_one_another(machines: Machines, model: str, tmp_path: Path) -> None:
    directory = tmp_path / "kv"
    disks = disks_of(machines, directory)
    lengths = {7: 540, 11: 540, 13: 540, 17: 1600}
    prompts = [[3 + i * step % 400 for i in range(length)] for step, length in lengths.items()]
    hosts = hostfile(machines, ["h1", "h2", {"ssh": "localhost"}])
    common = [model, "--hostfile", hosts, "--parallel", "1", "-dp", "2", "--kv-disk", str(directory), "--drain-timeout", "200"]
    with serving(machines, *common) as server:
        fleet = Fleet(server, disks)
        fleet.lent_to_all(2)
        # A prompt that one has computed is brought to the other.
        expected = fleet.ask("0", prompts[0])
        fleet.written("h1", 8)
        assert fleet.ask("1", prompts[0]) == expected
        assert fleet.counted("tandem_kv_disk_hit_tokens_total") == {"0": 0.0, "1": 512.0}
        assert fleet.counted("tandem_kv_disk_brought_bytes_total")["1"] > 0
        assert len(list(disks["h2"].glob("*/*.kv"))) == 8, "it is kept there too"
        # One that joins later, on the server's own machine, takes over what runs at one that drains.
        fleet.command("add")
        fleet.lent_to_all(3)
        undisturbed = fleet.ask("1", prompts[1], 400)
        body = {
            "model": "default",
            "prompt": prompts[1],
            "max_tokens": 7000,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "prompt_cache_key": fleet.key_of("0"),
        }
        text = ""
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=240) as stream:
            lines = (line for line in stream.iter_lines() if line.startswith("data: {"))
            for _ in range(40):
                text += json.loads(next(lines)[6:])["choices"][0]["text"]
            before = sum(fleet.counted("tandem_kv_disk_brought_bytes_total").values())
            fleet.command("drain", "0")
            eventually(
                lambda: re.search(
                    r"^tandem_requests_moved_total\S+ 1", httpx.get(f"{server.url}/metrics", timeout=240).text, re.M
                ),
                what=lambda: server.log,
            )
            while len(text) < len(undisturbed):
                text += json.loads(next(lines)[6:])["choices"][0]["text"]
        assert text.startswith(undisturbed)
        assert sum(fleet.counted("tandem_kv_disk_brought_bytes_total").values()) > before
        eventually(lambda: "0" not in fleet.counted("tandem_kv_disk_brought_bytes_total"), what=lambda: server.log)
        # What is on the server's own machine is brought to others too.
        expected = fleet.ask("2", prompts[2])
        assert httpx.get(f"{server.url}/v1/cache", timeout=240).status_code == 200  # all has been written
        before = fleet.counted("tandem_kv_disk_brought_bytes_total")["1"]
        assert fleet.ask("1", prompts[2]) == expected
        assert fleet.counted("tandem_kv_disk_brought_bytes_total")["1"] > before
        # A cable that is pulled while KV comes over it: it is computed.
        expected = fleet.ask("1", prompts[3])
        assert httpx.get(f"{server.url}/v1/cache", timeout=240).status_code == 200  # all has been written
        key, answers = fleet.key_of("2"), queue.SimpleQueue[str]()
        machines.slow("h2", rate="1mbit")
        sent = machines.sent("h2")
        thread = threading.Thread(
            target=lambda: answers.put(server.complete(prompt=prompts[3], prompt_cache_key=key)), daemon=True
        )
        thread.start()
        eventually(lambda: machines.sent("h2") > sent + 100_000, what=lambda: server.log)
        machines.cut("h2")
        try:
            assert answers.get(timeout=240) == expected
            eventually(lambda: not machines.processes("h2", "tandem.executors.worker"), what=lambda: server.log)
        finally:
            machines.heal("h2")
        server.wait_for(r"\[engine 1\].* Serving again on")
        assert re.search(LEFT, server.log)


def test_prompts_on_one_machine_and_answers_on_another(machines: Machines, model: str, tmp_path: Path) -> None:
    disks = {name: machines[name].home / "kv" for name in machines.names}  # each home is at a path of its own
    prompts = [[3 + i * step % 400 for i in range(length)] for step, length in ((7, 60), (11, 1300), (13, 2000), (17, 3000))]
    tokens = 200  # so many that nobody is done before its prompt is written
    params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    with LLM(model, kv_tokens=20_000) as llm:
        expected = [one.text for one in llm.generate(prompts, params)]
    common = [
        model,
        "--hostfile",
        hostfile(machines, ["h1", "h2"]),
        "--parallel",
        "1",
        "-dp",
        "2",
        "--roles",
        "prefill,decode",
        "--kv-disk",
        str(machines["h0"].home / "kv"),
        "--kv-tokens",
        "40000",
    ]
    with serving(machines, *common) as server, ThreadPoolExecutor(2) as pool:
        fleet = Fleet(server, disks)
        fleet.lent_to_all(2)
        fleet.hands_over()
        before, brought = fleet.handed_over, fleet.counted("tandem_kv_disk_brought_bytes_total")
        assert [server.complete(tokens, prompt=prompt) for prompt in prompts[:2]] == expected[:2]
        assert fleet.handed_over == before + 1, "a short prompt stays where its answer is"
        after = fleet.counted("tandem_kv_disk_brought_bytes_total")
        assert after["1"] > brought["1"] and after["0"] == brought["0"] == 0
        # The machine for prompts dies while one of them comes from it over its cable, and another is computed there.
        disk_blocks = len(list(disks["h1"].glob("*/*.kv")))
        machines.slow("h1", rate="1mbit")
        sent = machines.sent("h1")
        answers = [pool.submit(server.complete, tokens, prompt=prompt) for prompt in prompts[2:]]
        eventually(lambda: machines.sent("h1") > sent + 100_000, what=lambda: server.log)
        fleet.written("h1", disk_blocks + 2000 // 64 + 1)
        machines.cut("h1")
        try:
            for pid in machines.processes("h1", "tandem"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert [one.result() for one in answers] == expected[2:], server.log
            assert re.search(LEFT, server.log)
        finally:
            machines.heal("h1")
        server.wait_for(r"\[engine 0\].* Serving again on")
        fleet.hands_over()
