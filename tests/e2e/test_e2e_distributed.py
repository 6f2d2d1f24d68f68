"""`tandem.distributed` under vllm-mlx's names, as docs/migrating.md has it: a server, the communicator, programs that fail."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from hosts import eventually
from pids import gone
from served import PATIENCE_S, address, end
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "migrating.md"
STATELESS = {name: value for name, value in os.environ.items() if name not in ("MLX_RANK", "MLX_HOSTFILE", "TANDEM_BASE_URL")}

CHAT = """
curl http://machine-a:8000/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "default",
    "messages": [
      {"role": "user", "content": "Explain tensor parallelism in 3 sentences."}
    ],
    "max_tokens": 256,
    "temperature": 0.7,
    "stream": true
  }'
"""
HEALTH = "curl http://machine-a:8000/health"
"""Requests that vllm-mlx's page prints."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("distributed") / "tiny")


def recipe(call: str) -> str:
    """The one script of the page's section about vllm-mlx that has this call."""
    section = DOCS.read_text().split("## vllm-mlx: distributed tensor parallelism\n")[1].split("\n## ")[0]
    [script] = [one for one in re.findall(r"```python\n(.*?)```", section, re.DOTALL) if call in one]
    return str(script)


def hostfile(directory: Path) -> Path:
    """Two ranks on this machine, as vllm-mlx's page has a hostfile."""
    path = directory / "hosts.json"
    hosts = [{"ssh": "127.0.0.1", "ips": ["127.0.0.1"], "rdma": []}] * 2
    path.write_text(json.dumps({"backend": "ring", "envs": ["MLX_METAL_FAST_SYNCH=1"], "hosts": hosts}))
    return path


def test_vllm_mlxs_launcher(model: Path, tmp_path: Path) -> None:
    hostfile(tmp_path)
    log = tmp_path / "log"
    script = recipe("launch_distributed(")
    words = ["--model", str(model), "--continuous-batching", "--host", "127.0.0.1", "--port", "0"]
    script = script.replace('["--model", "demo", "--continuous-batching"]', repr(words))
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=errors, text=True, env=STATELESS, cwd=tmp_path
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
        for request in (HEALTH, CHAT):
            curl = request.replace("curl ", "curl -sS -f ").replace("http://machine-a:8000", base)
            said = subprocess.run(["bash", "-c", curl], capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout
            assert '"model_type"' in said or said.endswith("data: [DONE]\n\n")
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
result = mx.distributed.all_sum(mx.array(rank), group=communicator.group, stream=mx.cpu)
world_size = communicator.world_size
print(f"[Rank {rank}] all_sum result = {result.item()} (expected {world_size * (world_size - 1) // 2})", flush=True)
"""
"""What vllm-mlx's page has tried before a server is started, in the group that the script before it has made."""
LAUNCH = """
import sys
from tandem.distributed import launch_distributed
launch_distributed(sys.argv[1], sys.argv[2:], backend="ring", hostfile="hosts.json")
print("all ranks have ended")
"""


def launched(directory: Path, *words: str) -> subprocess.Popen[str]:
    """A program that launches another one on both hosts of `hosts.json`."""
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=directory,
        env=STATELESS,
    )


def test_the_communicators_operations(tmp_path: Path) -> None:
    hostfile(tmp_path)
    (tmp_path / "operations.py").write_text(recipe("MLXCommunicator()") + FIRST_TEST)
    process = launched(tmp_path, "operations.py")
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, text
    for rank in (0, 1):
        assert f"[Rank {rank}] 7 [1.5, 2.5] {{'name': 'tiny', 'layers': [0, 16]}} [11, 12] 3 ['gone']" in text
        assert f"[Rank {rank}] all_sum result = 1 (expected 1)" in text
    assert text.endswith("all ranks have ended\n")


RANK = """
import os, sys, time
print("started", os.getpid(), sys.argv[1:], flush=True)
if "wait" in sys.argv:
    time.sleep(600)
if os.environ["MLX_RANK"] == "1":  # the launcher ends the other one as soon as this one has failed
    while not os.path.exists("said"):
        time.sleep(0.01)
    sys.exit(3)
open("said", "w").close()
"""


def test_a_launched_program_that_fails_or_whose_launcher_is_ended_leaves_nothing_behind(tmp_path: Path) -> None:
    hostfile(tmp_path)
    (tmp_path / "program.py").write_text(RANK)
    process = launched(tmp_path, "no_such_module")
    assert "No module named no_such_module" in process.communicate(timeout=PATIENCE_S)[0] and process.returncode == 1
    (tmp_path / "hosts.json").rename(tmp_path / "other.json")
    process = launched(tmp_path, "program.py")
    assert "Hostfile hosts.json doesn't exist" in process.communicate(timeout=PATIENCE_S)[0] and process.returncode == 2
    (tmp_path / "other.json").rename(tmp_path / "hosts.json")
    process = launched(tmp_path, "program.py", "one", "two words")
    text, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1 and text.count("['one', 'two words']") == 2 and "Node with rank 1 exited with code 3" in text
    assert "all ranks have ended" not in text
    process = launched(tmp_path, "program.py", "wait")
    assert process.stdout is not None
    pids = [int(process.stdout.readline().split()[1]) for _ in range(2)]
    process.terminate()
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 128 + signal.SIGTERM
    eventually(lambda: all(gone(pid) for pid in pids))
