"""vllm-mlx's page on distributed tensor parallelism: item by item, and its commands, as printed or as the table has them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from served import PATIENCE_S
from tandem.launchers.hostfile import read_hostfile
from tandem.launchers.process_groups import free_ports, jaccl_process_group

WORKS = [
    (
        "`python -m vllm_mlx.distributed_launcher --backend jaccl --hostfile F -- --model M --continuous-batching "
        "--host 0.0.0.0 --port 8000`",
        "`tandem distributed_launcher` with the same words, which says which `tandem serve` it is: `tandem serve M "
        "--hostfile F -tp 2`; the file's `backend` counts, or `--backend jaccl`",
        "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher",
    ),
    (
        "`--model M`, `--host`, `--port`",
        "the same, or without the flag: `tandem serve M`",
        "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher",
    ),
    (
        "`--continuous-batching`, required",
        "always on; the launcher takes it",
        "tests/cli/test_cli_vllm_mlx.py::test_it_means_the_same",
    ),
    (
        "its other flags that have another name here: `--max-tokens`, `--timeout`, `--rate-limit`, ...",
        "the launcher takes them; `tandem serve` has `--default-max-tokens`, `--request-timeout`, `--requests-per-minute`, ...",
        "tests/cli/test_cli_vllm_mlx.py::test_it_means_the_same",
    ),
    ("what follows `--` goes to the server", "the same", "tests/cli/test_cli_vllm_mlx.py::test_it_means_the_same"),
    (
        "ranks of all hosts of the file share every layer",
        "the same: a rank for each host",
        "tests/cli/test_cli_vllm_mlx.py::test_there_is_a_rank_for_each_host",
    ),
    (
        "log lines `Loading sharded model`, `Sharded model loaded successfully`, `Post-load barrier passed`, "
        "`BatchGenerator created, entering StepPlan loop`, `Uvicorn running on`",
        "the same words in the same order, with `[Rank N]` before those of ranks",
        "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher",
    ),
    (
        "all ranks have loaded before the first request is taken",
        "the same",
        "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher",
    ),
    (
        "the hosts file that `mlx.distributed_config` writes: `backend`, `envs`, `hosts` with `ssh`, `ips`, `rdma`, "
        "null for itself",
        'read as it is: `--hostfile F`; several cables of a pair as a list, `[null, ["rdma_en2", "rdma_en3"]]`',
        "test_its_hosts_file_is_read",
    ),
    (
        "`test_distributed.py` under `mlx.launch --hostfile F --backend jaccl`",
        "the same, here over a ring. MLX 0.32 needs `mlx.launch --python PYTHON`; `tandem doctor --hostfile F` sums over "
        "all machines too",
        "test_its_first_program_runs_under_mlx_launch",
    ),
    (
        "preflight: RDMA, devices, `ssh machine-b hostname`, versions, `ls MODEL/config.json`, the hosts file",
        "`tandem doctor --hostfile F --model M` looks at all of it",
        "tests/diagnostics/doctor/test_doctor_checks.py",
    ),
    (
        "subnets that clash with the router's",
        "`tandem doctor` finds them and prints the command; `tandem hosts write` chooses others",
        "tests/diagnostics/doctor/test_doctor_checks.py",
    ),
    (
        "`ssh-copy-id`, a login without a password to each machine",
        "the same for ranks over ssh; `tandem hosts pair` needs none ([agent](launchers.md#agents-machines-without-ssh))",
        "tests/e2e/test_e2e_hosts.py",
    ),
    (
        "versions of Python, MLX, mlx-lm and its own must match",
        "compared when ranks join; who differs is named",
        "tests/diagnostics/doctor/test_doctor_checks.py",
    ),
    (
        "`scp -r MODEL machine-b:MODEL`, wheels carried to a machine without the internet",
        "the same; or `--weights-from head`, and `tandem hosts sync`",
        "tests/e2e/test_e2e_hosts.py::test_two_stages_over_three_machines_with_weights_from_the_head",
    ),
    (
        "manual start: `MLX_RANK`, `MLX_JACCL_COORDINATOR`, `MLX_IBV_DEVICES` on each machine, the launcher without `--hostfile`",
        "the launcher prints the two commands that do it, with the coordinator's host and the number of ranks: "
        "`tandem serve M --launcher manual --token-file F` and `tandem rank --join HOST --token-file F`, which reads "
        "these variables as under `mlx.launch`",
        "tests/cli/test_cli_vllm_mlx.py::test_what_cannot_be_is_refused",
    ),
    (
        "ranks by hand",
        "`tandem rank --join HEAD --token-file F` on each machine",
        "tests/e2e/test_e2e_join.py::test_machines_join_by_hand_in_reverse_order_and_before_the_head",
    ),
    ("`PYTHONUNBUFFERED=1`", "set for child processes", "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher"),
    (
        '`curl http://machine-a:8000/v1/chat/completions` with `"model": "default"`, `"stream": true`',
        "the same",
        "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher",
    ),
    (
        '`OpenAI(base_url="http://machine-a:8000/v1", api_key="not-needed")`, '
        '`client.chat.completions.create(model="default", ...)`',
        "the same",
        "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher",
    ),
    (
        "`curl http://machine-a:8000/health` with `model_type`",
        "the same key, and the others of vllm-mlx",
        "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher",
    ),
    ("HTTP on one machine alone", "the same", "tests/e2e/test_e2e_distributed.py::test_vllm_mlxs_launcher"),
    (
        "`launch_distributed(script_or_module, args, backend, hostfile)`",
        "`from tandem.distributed import launch_distributed`: the same arguments, and the same names of modules",
        "tests/e2e/test_e2e_distributed.py::test_the_communicators_operations",
    ),
    (
        "`MLXCommunicator`: `barrier()`, `broadcast_int`, `broadcast_tensor`, `broadcast_object`, "
        "`broadcast_step_plan`, `receive_step_plan`, `broadcast_tokens`",
        "`from tandem.distributed import MLXCommunicator, StepPlan`, with the same names",
        "tests/e2e/test_e2e_distributed.py::test_the_communicators_operations",
    ),
    (
        "all broadcasts are `all_sum`: one rank gives the value, the others zeros",
        "the same, in `tandem.distributed`",
        "tests/e2e/test_e2e_distributed.py::test_the_communicators_operations",
    ),
    (
        "StepPlan: `step_id inserts removes sampling_seeds fingerprint spec_decode_plan`",
        "the same names, and more; seeds are used",
        "tests/protocol/test_protocol_names.py",
    ),
    (
        "each step: a plan to all ranks, the forward pass, tokens of one rank to all",
        "the same; the engine makes the plan, the last stage samples",
        "tests/engine/test_engine_parity.py",
    ),
    (
        "n-gram proposer in distributed mode",
        "`--speculative-method ngram`, in every layout ([speculation](speculation.md))",
        "tests/e2e/test_e2e_speculation.py",
    ),
    ("`/v1/messages`, `/v1/responses`, count_tokens", "there ([other APIs](apis.md))", "tests/server/test_server_defaults.py"),
    (
        "`/v1/embeddings`",
        "there, from the served decoder model ([other APIs](apis.md))",
        "tests/server/openai/test_server_embeddings.py",
    ),
    (
        "`/v1/cache/stats`, `DELETE` cache",
        "`GET /v1/cache`, `DELETE /v1/cache` ([KV](kv.md#prompts-that-are-warmed))",
        "tests/e2e/test_e2e_cache.py",
    ),
    (
        "`/v1/status`, `/v1/requests/{id}/cancel`, `/metrics`",
        "there; metrics are named `tandem_*`",
        "tests/server/test_server_failures.py::test_cancel",
    ),
    (
        "`--enable-metrics`, `--metrics`",
        "on by default; both names are accepted",
        "tests/cli/test_cli_vllm_mlx.py::test_it_means_the_same",
    ),
    (
        "vLLM's `--enable-log-requests`, `--otlp-traces-endpoint`",
        "the same names; lines of requests are on by default, traces go by OTLP over HTTP ([watching a "
        "server](operate.md#watching-a-server))",
        "tests/server/test_server_tracing.py",
    ),
    (
        "`response_format`",
        "the same; the schema always holds ([structured output](structured-output-and-tools.md#structured-output))",
        "tests/server/chats/test_server_response_formats.py",
    ),
    (
        "tools, `--enable-auto-tool-choice`, `--tool-call-parser`, `--reasoning-parser`",
        "tools need no switch; `--tool-parser` and `--reasoning-parser` override what the chat template tells "
        "([tools](structured-output-and-tools.md#tools-and-reasoning))",
        "tests/cli/test_cli_vllm_mlx.py::test_it_means_the_same",
    ),
    (
        "`seed`, `logprobs`, `n`, `echo` (also with `logprobs`), `max_completion_tokens`, `stop` as text or list, "
        "prompts as token ids",
        "work",
        "tests/server/openai/test_server_completions.py",
    ),
    (
        "Kimi K2.5 (MoE, latent attention, 4 bit)",
        "its type is shared by ranks ([list](models-list.md))",
        "tests/loading/test_loading_shard_parity.py",
    ),
]
"""What is printed there, what does it here, and the test that shows it (of this file, where none is named)."""

DIFFERS = [
    (
        "`git clone`, `pip install -e .`, `pip install vllm-mlx`",
        "`git clone`, `make setup`",
        "there is no package in the registry yet, and `make setup` takes the locked versions",
    ),
    ("`vllm_mlx.__version__`", "`tandem version`", "the package has another name"),
    (
        "`python -m vllm_mlx.distributed_launcher`",
        "`tandem distributed_launcher`",
        "the module's name belongs to vllm-mlx, and both may be installed",
    ),
    (
        "`MLX_METAL_FAST_SYNCH=1` in `envs`, required",
        "set back to 0 with a warning; `--fast-sync auto` (or `on`) asks for it. Where the environment has it on "
        "Macs, the log says once what it would save",
        "it has locked GPUs up until the Mac was restarted ([what it risks](two-machines.md#fast-fences)); MLX's "
        "page now says to leave it unset",
    ),
    (
        "`MLX_DISTRIBUTED_BACKEND`",
        "not read: `--backend`, or `backend` of the hosts file",
        "one setting has one source, and an error can name it",
    ),
    ("`VLLM_MLX_DISTRIBUTED`, `VLLM_MLX_WORLD_SIZE`", "not read, not set", "ranks are told their layout when they join"),
    (
        "`broadcast_object` sends any object, pickled",
        "numbers, text, bytes, lists, dicts and `msgspec` structs; another object is an error on all ranks",
        "unpickling runs whatever another machine sends",
    ),
    ("fingerprint: MD5", "16 hex digits of BLAKE2b, over order and lengths", "MD5 is not allowed on every system"),
    (
        "`BATCH DESYNC DETECTED`, `Fingerprint mismatch`: restart the server by hand",
        "ranks stop before they compute, are replaced, and requests are replayed",
        "a fault of one step should cost a pause",
    ),
    (
        "the same absolute paths on both machines",
        "paths of code may differ; those of models may with `--weights-from head`",
        "machines of several people differ",
    ),
    (
        "`sharded_load()` over all ranks, by `all_sum`; 60 to 120 s",
        "each rank reads its own slice, without collectives",
        "a slow disk then holds up one rank alone",
    ),
    (
        "rank 0 runs API, scheduler and engine, the others are headless",
        "all ranks are headless; api and engine are processes beside them",
        "neither ends with a rank",
    ),
    ("rank 0 must start first, rank 1 five seconds later", "any order", "ranks try until a deadline"),
    (
        "`Uvicorn running` when the API starts",
        "the line comes when requests can be served; before, `/health` is 503",
        "whoever waits for it can send a request",
    ),
    ("prefix cache disabled in distributed mode", "on, with several ranks", "ranks save and restore by plan"),
    (
        "draft models and EAGLE not in TP",
        "`--draft-model` in every layout; multi-token prediction for "
        "[some families](speculation.md#guesses-from-the-checkpoints-draft-head), EAGLE-3 for "
        "[Llama and Qwen3](speculation.md#guesses-from-an-eagle-3-or-dflash-head); EAGLE 1 and 2 are not there",
        "their heads are no part of mlx-lm or mlx-vlm",
    ),
    ("tensor parallelism only", "pipeline parallelism as well, and both", "stages need less of the link"),
    (
        "a full mesh for jaccl, four machines at most",
        "`--backend jaccl-ring` for a ring of cables; stages go further",
        "each stage talks to its neighbours alone",
    ),
    (
        "nodes cannot be added or removed",
        "replicas are added and drained while the server runs (`tandem replica add`, `tandem replica drain 1`); a "
        "lost machine is done without, and taken in again. Layers are not spread over a further machine without a "
        "restart",
        "each rank holds a slice that was chosen when it started",
    ),
    (
        "`pkill -f vllm_mlx.distributed_launcher`, wait 30 s",
        "children end with their parent",
        "a pattern may hit somebody else's process",
    ),
    ("text models only", "text models, and [pictures](models.md#pictures) for some types; no audio", "one thing well, first"),
    (
        '`tool_choice: "required"` is not enforced',
        "enforced, with arguments that fit their schemas",
        "a client that requires a call cannot use anything else",
    ),
]
"""What is printed there, what there is here, and why it differs."""

ONLY_A_MAC = [
    (
        "`rdma_ctl enable`, recovery mode, `rdma_ctl status`, `ibv_devices`",
        "RDMA over Thunderbolt 5; tests read these tools' words (`tests/fake_mac`), `tandem doctor` looks at all",
    ),
    (
        "`mlx.distributed_config --auto-setup --over thunderbolt --backend jaccl --hosts machine-a,machine-b "
        "--output-hostfile F`",
        "asks Macs for their cables; a stand-in answers in tests. `tandem hosts write F HOST ... --over thunderbolt` "
        "calls it, with other subnets",
    ),
    ("`--backend jaccl`, `test_distributed.py` over RDMA", "what MLX is given is tested up to the call; never run so far"),
    (
        "`sudo ifconfig en3 inet 10.254.0.1 netmask 255.255.255.252`, `delete`, `sudo arp -d -a`",
        "a Mac's interfaces; the doctor prints such lines, tests read them",
    ),
    (
        "`EBUSY`, a port beside Ethernet, addresses gone after a restart",
        "faults of RDMA; [troubleshooting](troubleshooting.md) has each with its remedy",
    ),
    (
        "Kimi K2.5 on two M4 Ultra: 20.9 tokens a second, 47.8 ms a step, 1.9 s after an idle time",
        "figures of Metal and RDMA; `tandem plan` predicts them",
    ),
    ("`huggingface-cli download`, `pip download`", "tests never reach a hub or an index; `tandem pull ORG/NAME`"),
]
"""What Linux cannot show, and what is done instead."""

slow = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs" / "migrating.md"
HOSTFILE = """
{
  "backend": "jaccl",
  "envs": ["MLX_METAL_FAST_SYNCH=1"],
  "hosts": [
    {
      "ssh": "machine-a",
      "ips": ["10.254.0.1"],
      "rdma": [null, "rdma_en2"]
    },
    {
      "ssh": "machine-b",
      "ips": ["10.254.0.2"],
      "rdma": ["rdma_en2", null]
    }
  ]
}
"""
TEST_DISTRIBUTED = '''
"""Simple distributed connectivity test using MLX all_sum."""
import mlx.core as mx

group = mx.distributed.init(backend="jaccl", strict=True)
rank = group.rank()
world_size = group.size()

# Each rank contributes its rank number; the sum should equal 0+1 = 1
result = mx.distributed.all_sum(mx.array(rank), group=group)
mx.eval(result)

print(f"[Rank {rank}] all_sum result = {result.item()} (expected {world_size * (world_size - 1) // 2})")

if rank == 0:
    print(f"SUCCESS: {world_size} ranks communicating over RDMA")
'''
STATELESS = {name: value for name, value in os.environ.items() if name not in ("MLX_RANK", "TANDEM_BASE_URL")}


def test_its_hosts_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mlx_hostfile.json"
    file.write_text(HOSTFILE)
    read = read_hostfile(str(file))
    assert (read.backend, read.envs) == ("jaccl", (("MLX_METAL_FAST_SYNCH", "1"),))
    group = jaccl_process_group(
        "jaccl", [host.ssh for host in read.hosts], [[*host.rdma] for host in read.hosts], "10.254.0.1:7000"
    )
    assert json.loads(group.files(0)["MLX_IBV_DEVICES"]) == [[None, "rdma_en2"], ["rdma_en2", None]]
    assert group.variables(1) == {"MLX_RANK": "1", "MLX_JACCL_COORDINATOR": "10.254.0.1:7000"}


def two_ports() -> int:
    """First of two free ports in a row, which mlx.launch takes."""
    while True:
        [port] = free_ports(1)
        if free_ports(2, wanted=[port, port + 1]) == [port, port + 1]:
            return port


@slow
def test_its_first_program_runs_under_mlx_launch(tmp_path: Path) -> None:
    """Over a ring, since nothing here has RDMA."""
    (tmp_path / "mlx_hostfile.json").write_text(json.dumps([{"ssh": "127.0.0.1", "ips": ["127.0.0.1"]}] * 2))
    (tmp_path / "test_distributed.py").write_text(TEST_DISTRIBUTED.replace('backend="jaccl"', 'backend="ring"'))
    launch = Path(sys.executable).parent / "mlx.launch"
    words = ["--hostfile", "mlx_hostfile.json", "--backend", "ring", "--starting-port", str(two_ports())]
    words += ["--python", sys.executable, "test_distributed.py"]  # today's MLX runs no script without it
    done = subprocess.run(
        [str(launch), *words], cwd=tmp_path, env=STATELESS, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    for line in ("[Rank 0] all_sum result = 1 (expected 1)", "[Rank 1] all_sum result = 1 (expected 1)", "SUCCESS: 2 ranks"):
        assert line in done.stdout, done.stderr
