"""`tandem serve` as a user runs it: processes, HTTP, the official client, and what is left when it ends."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import APIStatusError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from served import Server, assert_idle, serving, start, wait_until
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "tandem.json"


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
    directory = tmp_path_factory.mktemp("tiny")
    model = tiny_model(directory / "model", dtype="float32", config={"head_dim": 32})
    keys = directory / "keys"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    options = ("-pp", "2", "--kv-dtype", "4bit", "--api-key-file", keys, "--log-format", "json")
    kind = partial(Server, key="secret")
    with (directory / "log").open("w") as errors, serving(model, *options, kind=kind, errors=errors) as server:
        server.log = directory / "log"
        yield server


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


class TestServer:
    def test_the_key_is_asked_for(self, tiny: Server) -> None:
        with pytest.raises(APIStatusError) as caught:
            OpenAI(base_url=f"{tiny.url}/v1", api_key="wrong", max_retries=0).models.list()
        assert caught.value.status_code == 401
        processes = [*tiny.family(), psutil.Process(tiny.process.pid)]
        assert "secret" not in " ".join(" ".join(process.cmdline()) for process in processes)

    def test_quantised_kv_is_told(self, tiny: Server) -> None:
        for path in ("/model/info", "/health"):
            told = tiny.get(path)
            assert (told["kv_dtype"], told["kv_bytes_per_token"]) == ("4bit in layers 0-3", 384)
        first, again = (answer(tiny, "hello " * 30, max_tokens=12).choices[0].message.content for _ in range(2))
        assert first == again
        if sys.platform == "linux":
            assert not [one.path for one in tiny.api().memory_maps() if "mlx" in one.path], "it serves without MLX"

    def test_a_client_that_goes_stops_its_work(self, tiny: Server) -> None:
        before = self._aborted(tiny)
        stream = answer(tiny, "hello", stream=True, max_tokens=400, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
        wait_until(lambda: self._aborted(tiny) > before, "it was not ended, or came to its own end")

    @staticmethod
    def _aborted(server: Server) -> float:
        return sum(
            float(line.split()[-1]) for line in server.metrics().splitlines() if line.startswith("tandem_request_aborted_total")
        )

    def test_all_processes_write_json_and_the_line_of_a_request_has_its_times(self, tiny: Server) -> None:
        said = answer(tiny, "hello", max_tokens=3, extra_body={"ignore_eos": True})

        def lines() -> list[dict[str, Any]]:
            return [json.loads(line) for line in tiny.log.read_text().splitlines()]

        wait_until(lambda: any(line.get("id") == said.id for line in lines()), "it has no line")
        assert {"api", "engine", "Rank 0", "Rank 1"} <= {line["process"].split(" stage")[0] for line in lines()}
        [line] = [line for line in lines() if line.get("id") == said.id]
        assert (line["client"], line["completion_tokens"], line["replica"]) == ("key1", 3, 0)
        assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["seconds"]

    def test_all_metrics_of_the_dashboard_are_there(self, tiny: Server) -> None:
        answer(tiny, "hello", max_tokens=3)
        there: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(tiny.metrics()):
            for sample in family.samples:
                there.setdefault(sample.name, set()).update(sample.labels)
        assert not [name for name in there if name.endswith("_created")]
        dashboard = json.loads(DASHBOARD.read_text())
        panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
        queries = [target["expr"] for panel in panels for target in panel["targets"]]
        queries += [one["definition"] for one in dashboard["templating"]["list"] if one["type"] == "query"]
        for query in queries:
            for name, labels in re.findall(r"\b(tandem_\w+)(?:\{([^}]*)\})?", query):
                assert name in there, query
                assert set(re.findall(r"(\w+)=", labels)) <= there[name], query
        assert len(queries) > 30

    def test_idle_ranks_cost_no_cpu(self, tiny: Server) -> None:
        answer(tiny, "hello", max_tokens=2)
        assert_idle([psutil.Process(tiny.process.pid), *tiny.family()])


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
