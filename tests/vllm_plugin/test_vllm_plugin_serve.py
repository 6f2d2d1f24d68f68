"""`vllm serve` of the demo model over two stages, as docs/vllm.md has it, through HTTP."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm_helpers import VLLM, Server, descendants, expected_tokens, gone, server

from tandem.launchers.process_groups import free_ports

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.demo]

SENTENCE = "The capital of France is"


@pytest.fixture(scope="module")
def served(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("serve") / "log"
    [port] = free_ports(1)
    with server(
        log,
        port,
        str(demo),
        "--served-model-name",
        "demo",
        "--max-model-len",
        "1024",
        "--pipeline-parallel-size",
        "2",
        "--host",
        "127.0.0.1",
    ) as one:
        yield one


def test_completions_are_those_of_tandem(served: Server, demo: Path) -> None:
    answer = served.post("/v1/completions", model="demo", prompt=SENTENCE, max_tokens=16, temperature=0, return_token_ids=True)
    choice = answer["choices"][0]
    assert choice["text"].startswith(" Paris")
    [wanted] = expected_tokens(demo, [choice["prompt_token_ids"]], 16)["served"]
    assert choice["token_ids"] == wanted


def test_chat_with_a_form_and_with_what_is_not_supported(served: Server) -> None:
    messages = [{"role": "user", "content": "Name a colour."}]
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "green"]}},
        "required": ["colour"],
        "additionalProperties": False,
    }
    answer = served.post(
        "/v1/chat/completions",
        model="demo",
        messages=messages,
        max_tokens=64,
        temperature=0,
        response_format={"type": "json_schema", "json_schema": {"name": "c", "schema": schema}},
    )
    assert json.loads(answer["choices"][0]["message"]["content"])["colour"] in ("red", "green")
    status, text = served.status("/v1/completions", model="demo", prompt=SENTENCE, max_tokens=4, bad_words=["Paris"])
    assert status == 400
    assert "bad_words is not supported" in text


def test_bench_serve(served: Server, demo: Path, tmp_path: Path) -> None:
    command = [
        str(VLLM),
        "bench",
        "serve",
        "--base-url",
        served.base,
        "--model",
        "demo",
        "--tokenizer",
        str(demo),
        "--dataset-name",
        "random",
        "--random-input-len",
        "16",
        "--random-output-len",
        "8",
        "--num-prompts",
        "8",
        "--ignore-eos",
        "--save-result",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "r.json",
    ]
    run = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["completed"] == 8
    assert result["total_output_tokens"] == 64


def test_a_worker_that_dies_ends_the_server_and_all_below_it(served: Server) -> None:
    below = descendants(served.process.pid)
    names = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace") for pid in below}
    victim = next(pid for pid, name in names.items() if "Worker" in name)
    os.kill(victim, signal.SIGKILL)
    served.process.wait(240)
    assert gone(below, 240)
    assert "died unexpectedly" in served.text
