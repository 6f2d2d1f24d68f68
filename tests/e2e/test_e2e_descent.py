"""What the ring project and vllm-mlx's distributed mode document (docs/migrating.md), command by command."""

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
from openai import OpenAI

from clients.page import blocks
from ring_project import DOTENV
from served import PATIENCE_S, address, end
from tandem.config.legacy import COMBINED, MAPPED, NOT_MAPPED
from tandem.launchers.process_groups import free_ports
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "migrating.md"
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


def test_vllm_mlxs_launcher(model: Path, tmp_path: Path) -> None:
    hosts, log = tmp_path / "mlx_hostfile.json", tmp_path / "log"
    hosts.write_text(
        json.dumps(
            {
                "backend": "ring",
                "envs": ["MLX_METAL_FAST_SYNCH=1"],
                "hosts": [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": []}] * 2,
            }
        )
    )
    words = [
        "distributed_launcher",
        "--backend",
        "ring",
        "--hostfile",
        str(hosts),
        "--",
        "--model",
        str(model),
        "--continuous-batching",
        "--host",
        "127.0.0.1",
        "--port",
        "0",
    ]
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tandem", *words], stdout=subprocess.PIPE, stderr=errors, text=True, env=STATELESS
        )
    try:
        base = address(process, log)
        said = log.read_text()
        assert "--model" in said and "--tensor-parallel-size 2`" in said.splitlines()[0]
        for rank in (0, 1):
            lines = [
                said.index(f"[Rank {rank}] {words}")
                for words in (
                    "Loading sharded model",
                    "Sharded model loaded successfully",
                    "Post-load barrier passed",
                    "BatchGenerator created, entering StepPlan loop",
                )
            ]
            assert lines == sorted(lines)
        assert said.count("Uvicorn running on http://127.0.0.1:") == 1
        assert said.index("Uvicorn running") > said.rindex("Post-load barrier passed")
        assert httpx.get(f"{base}/health", timeout=PATIENCE_S).json()["model_type"]
        client = OpenAI(base_url=f"{base}/v1", api_key="not-needed", max_retries=0, timeout=PATIENCE_S)
        messages: list[Any] = [{"role": "user", "content": "Hello from distributed inference!"}]
        answer = client.chat.completions.create(model="default", messages=messages, max_tokens=8)
        assert answer.choices[0].message.content is not None
        pieces = list(
            client.chat.completions.create(model="default", messages=messages, max_tokens=8, stream=True, temperature=0.7)
        )
        assert pieces[-1].choices[0].finish_reason in ("stop", "length")
    finally:
        end(process)


FIRST_TEST = """
result = mx.distributed.all_sum(mx.array(rank), group=group, stream=mx.cpu)
world_size = group.size()
print(f"[Rank {rank}] all_sum result = {result.item()} (expected {world_size * (world_size - 1) // 2})", flush=True)
"""
"""What vllm-mlx's page has tried before a server is started, in the group that the script before it has made."""


def test_the_communicators_operations(tmp_path: Path) -> None:
    section = DOCS.read_text().split("## vllm-mlx: distributed tensor parallelism\n")[1].split("\n## ")[0]
    [script] = re.findall(r"```python\n(import mlx.core.*?)```", section, re.DOTALL)
    (tmp_path / "operations.py").write_text(script + FIRST_TEST)
    # As mlx.launch would have it.
    (tmp_path / "ring.json").write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    ranks = [
        subprocess.Popen(
            [sys.executable, "operations.py"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env={**STATELESS, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(tmp_path / "ring.json")},
        )
        for rank in (0, 1)
    ]
    try:
        said = [rank.communicate(timeout=PATIENCE_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for number, text in enumerate(said):
        assert f"[Rank {number}] 7 [1.5, 2.5] [11, 12] 3 ['gone']" in text
        assert f"[Rank {number}] all_sum result = 1 (expected 1)" in text
