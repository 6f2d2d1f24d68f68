"""`tandem serve` as a user runs it: processes, HTTP, the official client, and what is left when it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import APIStatusError, OpenAI, OpenAIError

from served import Server, address, assert_gone, assert_idle, end, serving, start
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow


def answer(server: Server, text: str, **options: Any) -> Any:
    return server.client.chat.completions.create(
        model="default", messages=[{"role": "user", "content": text}], **{"max_tokens": 40, "temperature": 0, **options}
    )


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    with serving("demo", "--pipeline-parallel-size", "2") as server:
        yield server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    directory = tiny_model(tmp_path_factory.mktemp("tiny"))
    keys = _key_file(tmp_path_factory)
    with serving(directory, "-pp", "2", "--api-key-file", keys, kind=partial(Server, key="secret")) as server:
        yield server


def _key_file(factory: pytest.TempPathFactory) -> str:
    path = factory.mktemp("keys") / "keys"
    path.write_text("secret\n")
    path.chmod(0o600)
    return str(path)


@pytest.mark.demo
class TestDemoModel:
    def test_it_answers_in_sensible_english_over_two_ranks(self, demo: Server) -> None:
        reply = answer(demo, "What is the capital of France?")
        assert "Paris" in reply.choices[0].message.content
        assert reply.choices[0].finish_reason == "stop"
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
        assert reply.model_extra["performance"]["eval_tokens_per_second"] > 0
        health = demo.get("/health")
        assert health["world_size"] == 2 and [rank["layers"] for rank in health["ranks"]] == [[0, 15], [15, 30]]

    def test_streaming_gives_the_same_text(self, demo: Server) -> None:
        whole = answer(demo, "Name three colours.").choices[0].message.content
        chunks = list(answer(demo, "Name three colours.", stream=True, stream_options={"include_usage": True}))
        assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
        assert chunks[-1].usage.completion_tokens > 0

    def test_logprobs(self, demo: Server) -> None:
        content = answer(demo, "Say hello.", logprobs=True, top_logprobs=3, max_tokens=5).choices[0].logprobs.content
        assert len(content) == 5
        for entry in content:
            assert len(entry.top_logprobs) == 3 and entry.top_logprobs[0].token == entry.token
            assert -10 < entry.logprob <= 0

    def test_choices_seeds_and_stops(self, demo: Server) -> None:
        first = answer(demo, "Tell me a story.", n=3, temperature=1.0, seed=7, max_tokens=12)
        again = answer(demo, "Tell me a story.", n=3, temperature=1.0, seed=7, max_tokens=12)
        texts = [choice.message.content for choice in first.choices]
        assert texts == [choice.message.content for choice in again.choices]
        assert len(set(texts)) == 3
        stopped = answer(demo, "Count from one to ten: 1, 2, 3", stop=["5"], max_tokens=60)
        assert "5" not in stopped.choices[0].message.content

    def test_completions_of_several_prompts(self, demo: Server) -> None:
        reply = demo.client.completions.create(
            model="default", prompt=["The capital of France is", "2 + 2 ="], max_tokens=6, temperature=0, echo=True
        )
        assert [choice.index for choice in reply.choices] == [0, 1]
        assert reply.choices[0].text.startswith("The capital of France is Paris")

    def test_a_repeated_prompt_comes_from_the_prefix_cache(self, demo: Server) -> None:
        text = "Summarise: " + "The quick brown fox jumps over the lazy dog. " * 30
        cold = answer(demo, text, max_tokens=2)
        warm = answer(demo, text, max_tokens=2)
        assert cold.usage.prompt_tokens_details.cached_tokens == 0
        assert warm.usage.prompt_tokens_details.cached_tokens > 250
        assert warm.choices[0].message.content == cold.choices[0].message.content


class TestServer:
    def test_the_key_is_asked_for(self, tiny: Server) -> None:
        with pytest.raises(APIStatusError) as caught:
            OpenAI(base_url=f"{tiny.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert caught.value.status_code == 401
        processes = [*tiny.family(), psutil.Process(tiny.process.pid)]
        assert "secret" not in " ".join(" ".join(process.cmdline()) for process in processes)

    def test_bad_requests_are_named_and_the_server_goes_on(self, tiny: Server) -> None:
        for options in ({"max_tokens": 0}, {"temperature": -1}, {"extra_body": {"thinking_budget": -1}}):
            with pytest.raises(APIStatusError) as caught:
                answer(tiny, "hello", **options)
            assert caught.value.status_code == 400
        assert answer(tiny, "hello", max_tokens=3).usage.completion_tokens <= 3

    def test_a_client_that_goes_stops_its_work(self, tiny: Server) -> None:
        before = self._aborted(tiny)
        stream = answer(tiny, "hello", stream=True, max_tokens=400, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        deadline = time.monotonic() + 240
        while self._aborted(tiny) == before:
            assert time.monotonic() < deadline, "it was not ended, or came to its own end"
            time.sleep(0.1)

    @staticmethod
    def _aborted(server: Server) -> float:
        return sum(
            float(line.split()[-1]) for line in server.metrics().splitlines() if line.startswith("tandem_request_aborted_total")
        )

    def test_the_api_can_die_alone(self, tiny: Server) -> None:
        health = httpx.get(f"{tiny.url}/health", headers={"x-api-key": "secret"}, timeout=240).json()
        ranks = [rank["pid"] for rank in health["ranks"]]
        api = tiny.api()
        if sys.platform == "linux":
            assert not [one.path for one in api.memory_maps() if "mlx" in one.path], "it has served without MLX"
        api.kill()
        deadline = time.monotonic() + 240
        while True:
            try:
                assert answer(tiny, "hello again", max_tokens=3).choices
                break
            except OpenAIError:
                assert time.monotonic() < deadline
                time.sleep(0.2)
        assert all(psutil.pid_exists(pid) for pid in ranks), "the engine and its ranks stayed"

    def test_a_rank_that_dies_costs_a_pause(self, tiny: Server) -> None:
        options = {"max_tokens": 300, "extra_body": {"ignore_eos": True}}
        undisturbed = answer(tiny, "go on", **options).choices[0].message.content
        stream = answer(tiny, "go on", stream=True, **options)
        disk_blocks = []
        for i, chunk in enumerate(stream):
            disk_blocks.append(chunk.choices[0].delta.content or "")
            if i == 20:
                health = httpx.get(f"{tiny.url}/health", headers={"x-api-key": "secret"}, timeout=240).json()
                os.kill(health["ranks"][1]["pid"], signal.SIGKILL)
        assert "".join(disk_blocks) == undisturbed

    def test_idle_ranks_cost_no_cpu(self, tiny: Server) -> None:
        answer(tiny, "hello", max_tokens=2)
        assert_idle([p for p in tiny.family() if "tandem" in " ".join(p.cmdline())])


def failing(*arguments: str) -> tuple[int, str]:
    process = start(*arguments, errors=subprocess.PIPE)
    try:
        _, stderr = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, stderr


def test_what_cannot_be_served_ends_with_code_2_and_a_line(tmp_path: Path) -> None:
    directory = str(tiny_model(tmp_path))
    for arguments, word in (
        (["/no/such/model"], "no such directory"),
        ([directory, "-pp", "9"], "pipeline-parallel-size"),
        ([directory, "-pp", "2", "--layer-split", "1,1"], "layer-split"),
        ([directory, "--memory-fraction", "0.0000001"], "memory-fraction"),
        ([directory, "--temperature", "1"], "unrecognized"),
    ):
        code, stderr = failing(*arguments)
        assert code == 2, stderr
        assert word in stderr and "Traceback" not in stderr


def test_a_busy_port_ends_with_code_2(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [sys.executable, "-m", "tandem", "serve", str(tiny_model(tmp_path)), "--port", str(taken.getsockname()[1])]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 2 and "port" in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_killing_the_supervisor_leaves_no_orphan(tmp_path: Path) -> None:
    process = start(tiny_model(tmp_path), "-pp", "2")
    try:
        assert address(process)
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) == 4
    finally:
        end(process, signal.SIGKILL)
    assert_gone(family)
