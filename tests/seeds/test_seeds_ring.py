"""MLX Distributed Ring Inference: what its README says, item by item, and its commands, as printed or as the table has them."""

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
from tandem.launchers.hostfile import read_hostfile
from tandem.launchers.process_groups import free_ports, jaccl_process_group
from tandem.testing import tiny_model

WORKS = [
    (
        "`cp .env.example .env`, read by python-dotenv",
        "`tandem up --profile ring` (or `serve`) reads `.env` in the current directory with the same library; "
        "variables that are set win. Without the profile it is not read",
        "test_the_ring_projects_commands",
    ),
    (
        "`./launch.sh start`: syncs the worker, loads, starts the API",
        "`tandem up --profile ring` in the [background](operate.md#a-server-in-the-background), `tandem serve "
        "--profile ring` in the foreground. With workers in `.env`, this machine's Tandem is installed on them where "
        "it differs ([how](launchers.md#a-env-with-workers))",
        "tests/e2e/test_e2e_ring_machines.py::test_a_dotenv_with_a_worker_spreads_the_model",
    ),
    (
        "`./launch.sh start` stops what runs first",
        "`tandem up --profile ring --replace`; without `--replace` the same settings change nothing, and others are an error",
        "tests/e2e/test_e2e_ring_machines.py::test_a_dotenv_with_a_worker_spreads_the_model",
    ),
    (
        "`./launch.sh stop`",
        "`tandem down`; Ctrl-C or SIGTERM in the foreground. Requests may finish",
        "test_the_ring_projects_commands",
    ),
    (
        "`./launch.sh restart`",
        "`tandem restart`, which reads `.env` anew",
        "tests/e2e/test_e2e_ring_machines.py::test_a_dotenv_with_a_worker_spreads_the_model",
    ),
    ("`./launch.sh status`", "`tandem status`, `tandem top`", "test_the_ring_projects_commands"),
    (
        "`./launch.sh test`",
        "`tandem generate --prompt TEXT`, which asks the server that `tandem up` started",
        "test_the_ring_projects_commands",
    ),
    ("`tail -f server.log`", "`tandem logs -f`", "test_the_ring_projects_commands"),
    (
        "`curl http://localhost:8100/health`, `/health/live`, `/`, `/model/info`",
        "the same addresses and keys, and more; `/health` is 503 unless requests can be served",
        "test_the_ring_projects_commands",
    ),
    ("port 8100", "with `--profile ring`", "test_the_ring_projects_commands"),
    (
        "`MODEL_REPO`, `API_HOST`, `API_PORT`, `MAX_SEQUENCE_LENGTH`, `REQUEST_TIMEOUT_SECONDS`, "
        "`DEFAULT_MAX_TOKENS`, `LOG_LEVEL`, `KV_CACHE_MAX_SIZE`, `SOCKET_PATH`, `DISTRIBUTED_BACKEND`",
        "read; [configuration](configuration.md#variables-of-the-ring-project) has the setting of each",
        "test_the_ring_projects_commands",
    ),
    (
        "`NUM_DEVICES=2`: ranks share every layer (`model.shard()`)",
        "the same, one rank on each machine: it is the number of workers and this machine. A type whose layers "
        "cannot be shared runs in stages, with a warning; `--pipeline-parallel-size 2` asks for stages",
        "tests/cli/test_cli_ring.py::test_layers_are_shared_where_the_model_lets_them_else_divided_into_stages",
    ),
    (
        "`WORKER_HOSTS`, `WORKER_SSH`, `API_HOST`: `hosts.json` generated",
        "a list of hosts is made in memory: the machine where the command is given, then the workers; `--hostfile "
        "hosts.json` replaces it",
        "tests/e2e/test_e2e_ring_machines.py::test_a_dotenv_with_a_worker_spreads_the_model",
    ),
    (
        "`MODEL_CACHE_DIR=/Users/${USER}/.cache/huggingface/hub`",
        "`HF_HUB_CACHE`, where it ends in a folder `hub`, on workers too: a path below the home directory is below theirs there",
        "tests/config/test_config_loading.py::"
        "test_workers_of_the_ring_profile_are_a_hosts_list_in_memory_with_a_tensor_parallel_rank_on_each",
    ),
    (
        "`.env` copied to the worker",
        "not needed: ranks get their settings from the head when they start, and can get weights from it (`--weights-from head`)",
        "tests/e2e/test_e2e_hosts.py::test_two_stages_over_three_machines_with_weights_from_the_head",
    ),
    (
        "code copied to the worker",
        "`tandem hosts sync` does it by hand too ([clusters](launchers.md#the-same-tandem-everywhere))",
        "tests/cli/test_cli_hosts_sync.py::test_machines_get_this_tandem",
    ),
    (
        "`POST /v1/chat/completions` in OpenAI's form, `model` may be missing",
        "the same; `default` and the names of served models are accepted, other names are 404",
        "test_the_ring_projects_commands",
    ),
    (
        '`print(data["performance"])`: prompt and generation tokens a second, `cache_hit`',
        "the same three keys, and more",
        "test_the_ring_projects_commands",
    ),
    (
        "a conversation cache by `conversation_id` that tells hits",
        "with `--profile ring` a conversation is kept for an hour after an answer. A request with its "
        "`conversation_id` needs only the new message, and continues it; one that brings the history too replaces it "
        "([how](clients.md#conversations))",
        "test_the_ring_projects_commands",
    ),
    (
        "the API restarts without the model being loaded again; a Unix socket at `SOCKET_PATH` between them",
        "the same",
        "tests/faults/test_faults_processes.py::test_an_api_that_goes_leaves_engine_and_model_alone",
    ),
    ("the prompt reaches all ranks without a shared file system", "the same", "tests/e2e/test_e2e_hosts.py"),
    (
        '`[{"ssh": "127.0.0.1", "ips": [...], "rdma": [null, "rdma_device_path"]}, ...]` for `--backend jaccl`',
        "the file is read as it is",
        "test_its_hosts_files_are_read",
    ),
    (
        "a third entry in `hosts.json` adds a machine",
        "the same; `tandem hosts write hosts.json 127.0.0.1 USER@HOST ...` makes the file",
        "test_its_hosts_files_are_read",
    ),
    (
        '"127.0.0.1", not "localhost", for this machine',
        "both names are this machine",
        "tests/launchers/test_launchers_hostfile.py::test_everything_that_mlx_writes_is_read",
    ),
    (
        "values of the wrong type are named when it starts",
        "the same: variable, value and remedy, exit code 2",
        "tests/config/test_config_dotenv.py::test_what_cannot_be_read_is_named",
    ),
    (
        "nothing is kept on disk",
        "likewise, unless a [journal](background-work.md#requests-that-outlive-a-crash) or [KV on disk](kv.md) is asked for",
        "test_the_ring_projects_commands",
    ),
    (
        "zero infrastructure: no Docker, no database, started over ssh",
        "the same",
        "tests/e2e/test_e2e_two_machines.py::test_the_page_from_top_to_bottom",
    ),
    (
        "qwen3, llama, deepseek_v2 and other types shared by ranks",
        "the same; [the list](models-list.md) says which",
        "tests/loading/test_loading_shard_parity.py",
    ),
]
"""What is printed there, what does it here, and the test that shows it (of this file, where none is named)."""

DIFFERS = [
    (
        "`pip3 install --break-system-packages mlx mlx-lm ...`",
        "`make setup` in a checkout, or the wheel that `make release` makes",
        "there is no package in the registry yet",
    ),
    ("Python 3.14", "Python 3.11 or later", "nothing needs a newer one"),
    (
        "`mlx.launch` starts `server.py` on each machine",
        "`tandem up` starts the ranks itself; `mlx.launch -- tandem rank --join HEAD` is possible "
        "([clusters](launchers.md#ssh-by-hand-mlxlaunch))",
        "a rank that dies can then be replaced alone",
    ),
    (
        "`server.py` on each rank, `api.py` on rank 0, which broadcasts the prompt as bytes; each rank tokenises",
        "api, engine and ranks are processes of their own; the api tokenises once, and plans carry token ids",
        "one process cannot end another, and all ranks see the same tokens",
    ),
    (
        "`server.log`, `api.log`",
        "one log, which `tandem logs` prints; `tandem serve` writes to stderr",
        "lines of one request stand together",
    ),
    (
        "`API_HOST` 192.168.5.1 and `MODEL_REPO` a DeepSeek model by default",
        "127.0.0.1, and no default model",
        "a server without keys should not be open to a network",
    ),
    (
        "`KV_CACHE_RESERVED_MEMORY_MB`",
        "no effect, with a warning: `--memory-fraction` or `--kv-tokens`",
        "the KV cache is sized by what the weights leave",
    ),
    (
        "`MAX_PROMPT_LEN_BYTES`: longer prompts are cut or fatal",
        "no effect, with a warning: a prompt too long for the context is a 400",
        "tokens are what a context counts",
    ),
    ("`POLL_INTERVAL_SECONDS`", "no effect, with a warning", "nothing is polled"),
    (
        "`FILE_DESCRIPTOR_SOFT_LIMIT`, `FILE_DESCRIPTOR_HARD_LIMIT`",
        "no effect, with a warning: the limit is raised to 10240 where the hard one lets it; `ulimit -Hn` sets that",
        "the hard limit is the shell's to set",
    ),
    (
        "`MODEL_LOAD_WAIT_SECONDS`",
        "no effect, with a warning: `--start-timeout`",
        "`tandem up` returns when requests can be served, whenever that is",
    ),
    (
        "`REQUEST_FILE_PATH`, `RESPONSE_FILE_PATH`, `SERVER_LOG_PATH`, `API_LOG_PATH` of its `.env.example`",
        "no effect, with a warning",
        "requests do not travel through files",
    ),
    ("`name` in `GET /`", "Tandem's", "clients that look for a name should find the right one"),
    ('errors as `{"detail": ...}`', 'OpenAI\'s `{"error": {"message", "type", "param", "code"}}`', "official clients read that"),
    ("`stream: true` is 501", "streams", "clients expect it"),
    ("`finish_reason` always `stop`", "`stop` or `length`", "clients must know that an answer was cut"),
    (
        "504 after 120 s; the work goes on",
        "`--request-timeout` (or `REQUEST_TIMEOUT_SECONDS`), no limit by default; the work stops, also when a client goes",
        "what nobody waits for takes room from others",
    ),
    (
        "hits of the conversation cache count by id",
        "hits are those of the prefix cache, whatever the id: `usage.prompt_tokens_details.cached_tokens`, "
        "`performance.cache_hit`",
        "a prefix is the same, whoever sends it",
    ),
    (
        "no authentication; CORS for everyone",
        "`--api-key-file`, `--api-key`, `TANDEM_API_KEY`; `--cors-origin`, none by default",
        "pages of strangers could use the server",
    ),
    (
        "equal memory on all machines, heads must divide",
        "uneven layers (`--layer-split`) and shares of heads (`--tensor-split 2,1`)",
        "machines differ in memory and speed",
    ),
    (
        "pipeline only for DeepSeek V3 and Ministral; `'Qwen3Model' object has no attribute 'pipeline'`",
        "pipeline for every family in the [table](models-list.md), these among them",
        "stages are cut outside of a model's own code",
    ),
    (
        "mixed memory: use exo or mlx_sharding",
        "`tandem plan MODEL --hosts a=128GB:m4-max b=16GB:m4` chooses",
        "the planner knows each machine's memory",
    ),
    (
        "`--cwd /path` for `mlx.launch`; `server.py not found`",
        "no working directory is needed",
        "ranks are started by the module's name",
    ),
    (
        "`python3 test_config.py`; no other tests, no CI",
        "`make check`, `make test`; `.github/workflows` has both",
        "what is not tested breaks",
    ),
    (
        "machine detected: the same `.env` starts on either",
        "it starts on the machine that is not in `WORKER_HOSTS`; on a worker it is an error that says so",
        "the machine where a command is given is the head",
    ),
]
"""What is printed there, what there is here, and why it differs."""

ONLY_A_MAC = [
    (
        "two Mac mini M4, a Thunderbolt Bridge, Qwen3-14B-4bit at 12 tokens a second, 8 GB each, 7 s to load",
        "figures of Metal and a cable; `tandem plan` has the model among its presets and predicts them",
    ),
    (
        "RDMA: macOS 26.2, recovery mode, `mlx.launch --hostfile hosts.json --backend jaccl --verbose`",
        "needs Thunderbolt 5. What MLX is given is tested up to the call; `tandem doctor` says what is missing; "
        "[steps](two-machines.md#setting-up-machines)",
    ),
    ("the port beside Ethernet on a Mac Studio", "a matter of that Mac; `tandem doctor` names it where no device shows"),
    ("4 Mac mini in a daisy chain", "stages hand on between neighbours; tried with network namespaces alone"),
    ("`snapshot_download('mlx-community/Qwen3-14B-4bit')`", "tests never reach a hub; `tandem pull ORG/NAME`"),
]
"""What Linux cannot show, and what is done instead."""

slow = pytest.mark.slow

PROGRAM = """
import requests

response = requests.post(
    "http://localhost:8100/v1/chat/completions",
    json={
        "messages": [{"role": "user", "content": "What is machine learning?"}],
        "max_tokens": 100,
        "temperature": 0.7,
    },
)
data = response.json()
print(data["choices"][0]["message"]["content"])
print(data["performance"])  # tokens/sec metrics
"""
WITH_RDMA = """
[
    {"ssh": "127.0.0.1", "ips": ["192.168.5.2"], "rdma": [null, "rdma_device_path"]},
    {"ssh": "mini1@192.168.5.1", "ips": ["192.168.5.1"], "rdma": ["rdma_device_path", null]}
]
"""
WITH_A_THIRD = """
[
    {"ssh": "127.0.0.1", "ips": ["192.168.5.2"]},
    {"ssh": "mini1@192.168.5.1", "ips": ["192.168.5.1"]},
    {"ssh": "user@192.168.5.3", "ips": ["192.168.5.3"]}
]
"""
STATELESS = {
    name: value
    for name, value in os.environ.items()
    if name not in (*MAPPED, *COMBINED, *NOT_MAPPED, "HF_HUB_CACHE", "MLX_RANK", "TANDEM_BASE_URL")
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("ring") / "tiny")


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


@slow
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
    program = PROGRAM.replace("http://localhost:8100", ring.base)
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert "'eval_tokens_per_second'" in printed.stdout.splitlines()[-1]
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


def test_its_hosts_files_are_read(tmp_path: Path) -> None:
    file = tmp_path / "hosts.json"
    file.write_text(WITH_RDMA)
    hosts = read_hostfile(str(file)).hosts
    assert [(host.ssh, host.ips, host.is_here) for host in hosts] == [
        ("127.0.0.1", ("192.168.5.2",), True),
        ("mini1@192.168.5.1", ("192.168.5.1",), False),
    ]
    devices = [[*host.rdma] for host in hosts]
    group = jaccl_process_group("jaccl", [host.ssh for host in hosts], devices, "192.168.5.2:7000")
    assert json.loads(group.files(1)["MLX_IBV_DEVICES"]) == [[None, "rdma_device_path"], ["rdma_device_path", None]]
    file.write_text(WITH_A_THIRD)
    assert [host.reached_at for host in read_hostfile(str(file)).hosts] == ["192.168.5.2", "192.168.5.1", "192.168.5.3"]
