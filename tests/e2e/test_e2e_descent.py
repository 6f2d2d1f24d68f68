"""What the ring project documents (docs/migrating.md), command by command."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from clients.page import blocks
from ring_project import DOTENV
from served import PATIENCE_S
from tandem.config.legacy import COMBINED, MAPPED, NOT_MAPPED
from tandem.launchers.process_groups import free_ports
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow

STATELESS = {
    name: value
    for name, value in os.environ.items()
    if name not in (*MAPPED, *COMBINED, *NOT_MAPPED, "HF_HUB_CACHE", "MLX_RANK", "TANDEM_BASE_URL")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("descent") / "tiny")


class Ring:
    """A directory with a `.env` without workers, where `tandem` is run."""

    def __init__(self, directory: Path, model: Path) -> None:
        self.directory = directory
        [port] = free_ports(1)
        self.base = f"http://127.0.0.1:{port}"
        text = DOTENV.format(model=model, host="127.0.0.1", port=port, socket=directory / "ring.sock")
        (directory / ".env").write_text("".join(line for line in text.splitlines(True) if not line.startswith("WORKER_")))
        self.names = {line.partition("=")[0] for line in text.splitlines()}

    def __call__(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "tandem", *words],
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**STATELESS, "TANDEM_STATE_DIR": str(self.directory / "state")},
        )

    def chat(self, **fields: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "What is machine learning? " * 8}]
        body = {"messages": messages, "temperature": 0.7, **fields}
        answer = httpx.post(f"{self.base}/v1/chat/completions", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found


@pytest.fixture
def ring(tmp_path: Path, model: Path) -> Iterator[Ring]:
    one = Ring(tmp_path, model)
    yield one
    one("down", "--now")


def test_the_ring_projects_commands(ring: Ring) -> None:
    assert ring.names == {*MAPPED, *COMBINED, *NOT_MAPPED}
    started = ring("up", "--profile", "ring", "--tensor-parallel-size", "2")
    assert f"default is ready: {ring.base}" in started.stdout, started.stderr
    for name in NOT_MAPPED:
        assert re.search(rf"WARNING .*{name} has no effect: \w+", started.stderr), name

    health = httpx.get(f"{ring.base}/health", timeout=PATIENCE_S).json()
    assert health["status"] == "healthy"
    assert httpx.get(f"{ring.base}/health/live", timeout=PATIENCE_S).status_code == 200
    assert "endpoints" in httpx.get(ring.base, timeout=PATIENCE_S, headers={"Accept": "application/json"}).json()
    info = httpx.get(f"{ring.base}/model/info", timeout=PATIENCE_S).json()
    assert (info["max_context_length"], info["num_devices"]) == (512, 2)

    first = ring.chat(conversation_id="c1")
    assert first["conversation_id"] == "c1" and first["usage"]["completion_tokens"] <= 7
    assert {"prompt_eval_tokens_per_second", "eval_tokens_per_second", "cache_hit"} <= first["performance"].keys()
    again = ring.chat(conversation_id="c1", max_tokens=100)
    assert again["conversation_messages"] == 2 and again["performance"]["cache_hit"] is True
    assert again["usage"]["prompt_tokens"] > first["usage"]["prompt_tokens"] + first["usage"]["completion_tokens"]
    [commands] = [code for heading, code in blocks("bash") if heading == "Conversations"]
    for count, command in enumerate(re.split(r"\n(?=curl )", commands.strip())):
        words = command.replace("curl ", "curl -sS -f ", 1).replace("http://127.0.0.1:8100", ring.base)
        said = subprocess.run(["bash", "-c", words], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
        assert json.loads(said.stdout)["conversation_messages"] == 2 * count
    with httpx.stream(
        "POST",
        f"{ring.base}/v1/chat/completions",
        timeout=PATIENCE_S,
        json={"messages": [{"role": "user", "content": "a"}], "stream": True},
    ) as stream:
        assert stream.status_code == 200 and "data: [DONE]" in stream.read().decode()

    [status] = json.loads(ring("status", "--json", "--interval", "0").stdout)
    assert [rank["stage"] for rank in status["replicas"][0]["ranks"]] == [0, 0]
    assert "engine ready" in ring("logs").stdout
    tested = ring("generate", "--prompt", "What is machine learning?", "--max-tokens", "3")
    assert tested.returncode == 0, tested.stderr
    again = ring("restart")
    assert f"default is ready: {ring.base}" in again.stdout, again.stderr
    [restarted] = json.loads(ring("status", "--json", "--interval", "0").stdout)
    assert restarted["pid"] != status["pid"]
    assert ring.chat(max_tokens=2)["usage"]["completion_tokens"] <= 2
    assert "default has ended" in ring("down").stdout
