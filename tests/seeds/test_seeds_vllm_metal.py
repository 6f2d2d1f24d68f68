"""vllm-metal's page on distributed inference with Ray: its commands, item by item, and those of docs/vllm.md, as printed.

Machines are network namespaces (tests/netns.py), each with a raylet of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import vllm_helpers
from vllm_helpers import START_S, VLLM
from vllm_ray import PROMPT, SMALL, Cluster, block

from netns import why_not

WORKS = [
    (
        "`vllm serve MODEL` on one Mac, without Ray",
        "the same with the [plugin](vllm.md), which `make vllm-env` installs with vLLM and Ray; or `tandem serve MODEL`",
        "tests/vllm_plugin/test_vllm_plugin_serve.py::test_completions_are_those_of_tandem",
    ),
    (
        '`IP=$(python -c "from vllm.utils.network_utils import get_ip; print(get_ip())")`, then `ray start --head '
        '--node-ip-address="$IP" --resources=\'{"mlx": 1}\'`',
        "the same",
        "test_one_machine",
    ),
    (
        "one worker for each unit of the resource `mlx`, as a Ray actor",
        "the same; where no node has `mlx`, Ray's own `GPU` counts",
        "test_devices_are_counted_once_and_what_is_missing_is_named_at_once",
    ),
    (
        "`RAY_ADDRESS=auto vllm serve MODEL --distributed-executor-backend ray --tensor-parallel-size 1`",
        "the same; `tandem serve` has `--launcher ray` and `--ray-address HOST:PORT` or `new` ([Ray](launchers.md#ray))",
        "test_one_machine",
    ),
    ("`curl -s localhost:8000/v1/completions`, `/v1/chat/completions`", "the same", "test_one_machine"),
    ("`ray stop`", "the same", "test_one_machine"),
    (
        "two Macs: `VLLM_HOST_IP=10.0.0.1 ray start --head --node-ip-address=10.0.0.1 ...`, `VLLM_HOST_IP=10.0.0.2 "
        "ray start --address=10.0.0.1:6379 --node-ip-address=10.0.0.2 ...`",
        "the same, on two machines",
        "test_a_pipeline_over_two_machines_and_the_death_of_a_worker",
    ),
    (
        "`RAY_ADDRESS=auto VLLM_HOST_IP=10.0.0.1 VLLM_METAL_USE_PAGED_ATTENTION=1 vllm serve MODEL "
        "--distributed-executor-backend ray --pipeline-parallel-size 2 --tensor-parallel-size 1 "
        "--no-async-scheduling`",
        "the same. `tandem serve` has `-pp 2`, and `--layer-split 20,16` chooses the layers",
        "test_a_pipeline_over_two_machines_and_the_death_of_a_worker",
    ),
    (
        "log: `Pipeline stage 0/2 (is_first=True, is_last=False)`, `Pipeline stage 1/2 (is_first=False, is_last=True)`",
        "the same words",
        "test_a_pipeline_over_two_machines_and_the_death_of_a_worker",
    ),
    (
        "`curl -s http://10.0.0.1:8000/v1/completions` from the first machine",
        "the same",
        "test_a_pipeline_over_two_machines_and_the_death_of_a_worker",
    ),
    (
        "`VLLM_HOST_IP` decides over which network stages hand on",
        "the same",
        "test_a_pipeline_over_two_machines_and_the_death_of_a_worker",
    ),
    (
        "each machine must have the model",
        "the same; `tandem serve` can send it (`--weights-from head`)",
        "test_a_pipeline_over_two_machines_and_the_death_of_a_worker",
    ),
    (
        "ring ports 32323 and 32324, stage r at base + r; `VLLM_METAL_RING_BASE_PORT` shifts them",
        "the same under the plugin, for several machines; where a port is taken a free one is used, with a warning. "
        "`TANDEM_BASE_PORT` is our name; `tandem serve` takes free ports",
        "tests/vllm_plugin/test_vllm_plugin_options.py::test_names_of_vllm_metal_and_ours",
    ),
    (
        "`ray_device_key` is `mlx`, `device_control_env_var` is `VLLM_METAL_VISIBLE_DEVICES`",
        "the same under the plugin: one device, number 0. `tandem serve` does not read the variable",
        "tests/vllm_plugin/test_vllm_plugin_refused.py::test_variables_of_vllm_metal_are_known",
    ),
    (
        "the layers are cut into contiguous stages; the first embeds, the last has the norm, the head and the "
        "sampler; one activation for each boundary",
        "the same; `VLLM_PP_LAYER_PARTITION` chooses the layers",
        "tests/vllm_plugin/test_vllm_plugin_layouts.py::test_greedy_tokens_of_a_layout",
    ),
    (
        "TP over two Ray nodes, which its older page has after `ray.init`",
        "the same, a rank on each node",
        "test_tensor_parallelism_over_two_machines_after_ray_init",
    ),
    (
        "the mp executor, for stages on one machine",
        "the same",
        "tests/vllm_plugin/test_vllm_plugin_layouts.py::test_greedy_tokens_of_a_layout",
    ),
    (
        "mlx-lm's model files are untouched",
        "likewise",
        "tests/vllm_plugin/test_vllm_plugin_layouts.py::test_greedy_tokens_of_a_layout",
    ),
    (
        "`PARITY PASS max_abs_diff=0.000e+00`: stages compute the same bits",
        "the same line, of `tandem parity MODEL --pipeline-parallel-size 2`",
        "tests/diagnostics/parity/test_parity_run.py::test_every_layout_passes",
    ),
    (
        "the reference first, then `mlx.launch -n 2 --backend ring tools/pp_parity_check.py MODEL`",
        "`tandem parity MODEL`, then `mlx.launch -n 2 --backend ring -- tandem parity MODEL` ([parity](checks.md#parity))",
        "tests/diagnostics/parity/test_parity_launch.py::test_first_alone_then_as_two_ranks",
    ),
    (
        "`vllm serve MODEL --max-model-len 8192 --data-parallel-size 2 --data-parallel-backend ray "
        "--data-parallel-size-local 1 --data-parallel-address 10.0.0.1`",
        "the same; `tandem serve` has `--launcher ray -dp 2`",
        "test_replicas_on_two_machines",
    ),
    (
        "`VLLM_METAL_MEMORY_FRACTION=0.5`",
        "the same; `TANDEM_MEMORY_FRACTION` is our name, `--memory-fraction` that of `tandem serve`",
        "test_replicas_on_two_machines",
    ),
    ("a replica on each machine behind one address; the load is balanced there", "the same", "test_replicas_on_two_machines"),
    (
        "`--max-model-len`",
        "the same; `tandem serve` calls it `--max-context`, and takes the old name",
        "tests/vllm_plugin/test_vllm_plugin_serve.py::test_completions_are_those_of_tandem",
    ),
    (
        "DP with MoE, multimodal models, speech or LoRA, `--data-parallel-external-lb`, `--data-parallel-hybrid-lb`, "
        "`--data-parallel-size-local 0`: rejected at configuration",
        "rejected at configuration, each with a sentence",
        "tests/vllm_plugin/test_vllm_plugin_refused.py::test_what_cannot_run_is_refused_at_configuration",
    ),
    (
        "pooling models, vision models and LoRA: rejected",
        "rejected under the plugin, by name, before anything starts; `tandem serve` has "
        "[adapters](models.md#several-models-and-lora-adapters), embeddings of decoders, and [pictures](models.md#pictures) "
        "for some types",
        "tests/vllm_plugin/test_vllm_plugin_refused.py::test_what_cannot_run_is_refused_at_configuration",
    ),
    (
        "no cluster can be reached: fails loud",
        "likewise; the sentence is the last of the log",
        "test_a_cluster_that_is_not_there_is_the_last_of_the_log",
    ),
    (
        "`vllm bench serve`",
        "the same, against `vllm serve` or `tandem serve`; `tandem bench serve` has many of its flags "
        "([which](performance.md#measuring-and-watching-a-server))",
        "tests/vllm_plugin/test_vllm_plugin_serve.py::test_bench_serve",
    ),
]
"""What is printed there, what does it here, and the test that shows it (of this file, where none is named)."""

DIFFERS = [
    (
        "`source .venv-vllm-metal/bin/activate`",
        "`source .vllm-venv/bin/activate`",
        "the environment holds another plugin, and both can be there",
    ),
    (
        "log: `patched Ray V2 worker get_node_and_gpu_ids on RayWorkerProc (Apple-GPU custom Ray resource)`",
        "`tandem: patched Ray V2 worker get_node_and_physical_gpu_ids on RayWorkerProc (custom Ray resource mlx)`",
        "vLLM 0.32 has renamed the method; the line names what was patched",
    ),
    (
        "hangs, and logs `No available node types can fulfill resource request`, where no node has `mlx`",
        "ends within seconds with a sentence, the last of the log, that says what each node has",
        "a start that cannot succeed should not wait",
    ),
    (
        "log: `current platform cpu does not support ray` when the plugin is inactive",
        "an error that begins `vLLM has chosen`",
        "it names the reason, and what to do",
    ),
    (
        "the Ray node's address must be what `get_ip()` says; no mixing of loopback and LAN addresses",
        "the address that the node advertises is used. One that Ray does not know is refused by name, with the value "
        "for `VLLM_HOST_IP`",
        "a mismatch is found before anything starts",
    ),
    (
        "activations travel over the MLX ring, whose bootstrap lists both addresses",
        "over Tandem's channels; the log says `stages hand on over tcp://...`. The MLX ring is for ranks of one stage",
        "MLX's ring has neither keys nor encryption, and a message that nobody receives holds up its sender's GPU",
    ),
    (
        "gloo between processes: host names must resolve to the cable's address; `GLOO_SOCKET_IFNAME` unset",
        "gloo is not used; host names are not looked at",
        "addresses are all that a rank needs",
    ),
    (
        "a `worker_process_setup_hook` at job level, hence no `ray.init` before",
        "an actor of Tandem's; no hook. A Ray that the program has joined is used",
        "nothing has to be set before the program connects",
    ),
    (
        "`--no-async-scheduling`, required for PP",
        "taken, and not needed",
        "plans carry what the first stage must know of the last one's tokens",
    ),
    (
        "TP is 1, PP with TP is rejected",
        "both are served, also together, and over two Ray nodes. Under vLLM heads must divide by the tensor-parallel "
        "size, which is vLLM's rule; `tandem serve` has `--tensor-split 2,1`",
        "ranks of a stage share its layers, whatever the stages are",
    ),
    ("`tools/pp_parity_check.py`", "`tandem parity`", "a command works in any directory, for every layout of Tandem's"),
    (
        "reference in `/tmp/pp_ref_<model>.npy`",
        "in the cache directory, or where `--reference FILE` says",
        "a file in `/tmp` may be anybody's",
    ),
    (
        "each stage loads the whole model first, which must fit one Mac",
        "each rank reads its own slice alone",
        "models that fit no single Mac are why there are several",
    ),
    (
        "stages on one Mac take `VLLM_METAL_MEMORY_FRACTION` each",
        "the fraction is for all workers of a machine together",
        "workers of a machine count one another",
    ),
    ("`VLLM_METAL_USE_PAGED_ATTENTION`", "no effect, and the log says so", "the KV store is Tandem's own, in every mode"),
    (
        "hybrid models and MLA rejected for PP, sliding windows and MoE untested",
        "served. Tested with small random models of each type ([list](models-list.md)); an architecture that Tandem "
        "lacks is refused by name",
        "ranks run Tandem's models, which are cut anywhere between layers",
    ),
    (
        "models whose layers share keys and values (YOCO) rejected",
        "`tandem serve` runs Gemma 3n and 4 in stages; vLLM takes them for models that see, and the plugin refuses them",
        "stages pass on what later layers share",
    ),
    (
        "speculative decoding rejected for PP",
        "under vLLM n-grams on one rank; [in every layout](speculation.md) with `tandem serve`",
        "vLLM may schedule drafts before the token that they follow is known",
    ),
    (
        "DP with PP, with TP or with speculative decoding rejected",
        "with replicas by Ray rejected too. With mp, on one machine, stages and ranks that share layers are served, "
        "and n-grams for replicas of one rank. `tandem serve --launcher ray -dp N` has no such limit",
        "vLLM places one Ray worker for each replica",
    ),
    (
        "`--data-parallel-size-local` other than 1 rejected",
        "as many as the first node has devices",
        "a machine may have several devices",
    ),
    (
        "replicas by the mp backend overcommit one Mac",
        "replicas on one machine share its memory by their number",
        "workers of a machine count one another",
    ),
    (
        "other load balancers, `--data-parallel-external-lb`",
        "not there for `tandem serve` either; a balancer of your own can stand before several servers, each with `/health/ready`",
        "nobody has needed one built in",
    ),
]
"""What is printed there, what there is here, and why it differs."""

ONLY_A_MAC = [
    (
        '`sudo networksetup -setmanual "Thunderbolt Bridge" 10.0.0.1 255.255.255.0`, `-setdhcp`, `ping -c3 10.0.0.2`',
        "macOS's own commands for a cable. Tests give network namespaces these addresses; [step by "
        "step](two-machines.md#setting-up-machines)",
    ),
    (
        "`sudo scutil --set HostName maca`, the line in `/etc/hosts`, the check with `gethostbyname`",
        "macOS's names; here they do not matter, and `tandem doctor` reads them",
    ),
    (
        "`RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=1`, `RAY_DEFAULT_PYTHON_VERSION_MATCH_LEVEL=minor`",
        "Ray on macOS reads them for `ray start`. `tandem serve` sets both for itself, and compares versions of "
        "Python, Tandem, mlx and mlx-lm",
    ),
    ("Ray's `GPU` on Apple silicon", "Ray counts it there by itself; tests tell a node that it has two"),
    ("the firewall of each Mac must allow the ring's ports", "the application firewall of macOS; `tandem doctor` names it"),
    ("a run with Qwen3-0.6B over Thunderbolt; what data parallelism gains", "models of the hub, a cable, and figures of Metal"),
]
"""What Linux cannot show, and what is done instead."""

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"no machines to test on: {why_not()}"),
]

QUERY = """curl -s http://10.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
  -d '{"model":"Qwen/Qwen3-0.6B","prompt":"The capital of France is","max_tokens":16,"temperature":0}'"""
"""The request that its page has for two machines."""


def test_a_cluster_that_is_not_there_is_the_last_of_the_log(tiny: Path, tmp_path: Path) -> None:
    """In this file, since Ray finds the clusters of other tests on this machine, whatever their machine is."""
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [str(VLLM), "serve", str(tiny), "--distributed-executor-backend", "ray"],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "vllm: no Ray cluster can be used on this machine: start one with ray start --head --resources='{\"mlx\": 1}', "
        "or set RAY_ADDRESS"
    )
    assert "Traceback" not in done.stdout + done.stderr


def test_one_machine(one_machine: Cluster, wanted: list[int], tmp_path: Path) -> None:
    *start, serve = block("Ray, one machine", 0).strip().splitlines()
    one_machine.run("h0", "\n".join(start))
    with one_machine.serve(serve, tmp_path / "log"):
        answer = json.loads(one_machine.run("h0", block("Ray, one machine", 1)))
        assert answer["usage"]["completion_tokens"] == 16
        assert one_machine.complete()["token_ids"] == wanted
        assert "RayWorkerProc (custom Ray resource mlx)" in (tmp_path / "log").read_text()
    assert "/1.0 mlx" in one_machine.run("h0", "ray status")  # how much of it is free Ray says some seconds later
    nodes = "import ray; ray.init(address='auto'); print([n['NodeManagerAddress'] for n in ray.nodes() if n.get('Alive')])"
    assert one_machine.run("h0", f'python -c "{nodes}"').split()[-1] == f"['{one_machine.machines['h0'].address}']"
    one_machine.run("h0", block("Ray, one machine", 2))
    assert not one_machine.machines.processes("h0", "raylet")


ROWS = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from vllm_helpers import PROMPTS, engine, generate
found = {}
for name, options in json.loads(sys.argv[3]).items():
    os.environ |= options.pop("environment", {})
    try:
        with engine(sys.argv[2], distributed_executor_backend="ray", max_num_seqs=8, **options) as llm:
            found[name] = generate(llm, PROMPTS, 16)
    except Exception as error:
        found[name] = str(error)
print(json.dumps(found))
"""
"""Engines in one process, one after the other: their tokens, or why they were refused."""


def rows(cluster: Cluster, **options: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """What ROWS found, and what its processes said."""
    words = [sys.executable, "-c", ROWS, str(Path(vllm_helpers.__file__).parent), str(cluster.model), json.dumps(options)]
    cluster.machines.set_variables("h0", {"RAY_ADDRESS": "auto"})
    done = cluster.machines.run("h0", words, timeout=START_S * len(options))
    return json.loads(done.stdout.splitlines()[-1]), done.stdout + done.stderr


def test_devices_are_counted_once_and_what_is_missing_is_named_at_once(one_machine: Cluster, expected: list[list[int]]) -> None:
    address = one_machine.machines["h0"].address
    head = f"ray start --head --node-ip-address={address} --num-gpus=2 --include-dashboard=false{SMALL}"
    one_machine.run("h0", head + " --resources='{\"mlx\":4}'")
    found, said = rows(
        one_machine, both={"tensor_parallel_size": 2, "pipeline_parallel_size": 2}, many={"pipeline_parallel_size": 5}
    )
    assert found["both"] == expected
    assert "the layout needs 5 of the Ray resource 'mlx'" in found["many"]
    assert "the cluster has 4 of 'mlx'" in found["many"]
    one_machine.run("h0", block("Ray, one machine", 2))
    one_machine.run("h0", head)
    found, said = rows(
        one_machine,
        gpus={"pipeline_parallel_size": 2},
        many={"pipeline_parallel_size": 3},
        lost={"environment": {"VLLM_HOST_IP": "203.0.113.9"}},
    )
    assert found["gpus"] == expected
    assert "RayWorkerProc (custom Ray resource GPU)" in said
    assert "the cluster has 2 of 'GPU'" in found["many"]
    assert f"vLLM resolves this machine to 203.0.113.9, and Ray knows {address}: set VLLM_HOST_IP={address}" in found["lost"]


def test_replicas_on_two_machines(two_machines: Cluster, wanted: list[int], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with two_machines.serve(block("Ray, data parallelism", 0), log) as process:
        assert all(two_machines.workers(name) for name in ("h0", "h1"))
        for _ in range(4):
            assert two_machines.complete()["token_ids"] == wanted
        two_machines.machines.signal(process, signal.SIGTERM)
        assert process.wait(START_S) == 0, log.read_text(errors="replace")[-6000:]
    deadline = time.monotonic() + 30
    while left := two_machines.machines.processes("h0", "VLLM::"):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


OVER_TWO_NODES = """
import json, socket, subprocess, sys, time
import ray
sys.path.insert(0, sys.argv[1])
from vllm_helpers import engine, generate
model, prompt, machine = sys.argv[2], json.loads(sys.argv[3]), sys.argv[4]

# A server of its own for the client: the one on 10001 forks another, whose start Ray does not always survive.
server = [sys.executable, "-m", "ray.util.client.server", "--mode", "legacy", "--host", machine, "--port", "10555"]
process = subprocess.Popen([*server, "--address", f"{machine}:6379"])
try:
    while process.poll() is None:
        with socket.socket() as ours:
            if ours.connect_ex((machine, 10555)) == 0:
                break
        time.sleep(0.2)
    for address in (f"ray://{machine}:10555", "auto"):
        ray.init(address=address)
        try:
            with engine(model, tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
                print(json.dumps(generate(llm, [prompt], 16)))
        except Exception as error:
            print(address, error)
        ray.shutdown()
finally:
    process.kill()
    process.wait()
"""
"""The older page's example: a program that joins the cluster, and a model with a rank on each node."""


def test_tensor_parallelism_over_two_machines_after_ray_init(two_machines: Cluster, wanted: list[int]) -> None:
    first, second = (two_machines.machines[name].address for name in ("h0", "h1"))
    words = [str(Path(vllm_helpers.__file__).parent), str(two_machines.model), json.dumps(PROMPT), first]
    done = two_machines.machines.run("h0", [sys.executable, "-c", OVER_TWO_NODES, *words], timeout=2 * START_S)
    said = done.stdout + done.stderr
    assert f'ray://{first}:10555 a Ray client (ray://) is no node: on a node use ray.init(address="auto")' in done.stdout
    assert json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[["))) == [wanted], said[-6000:]
    assert f"MLX ring of stage 0: {first}:32325, {second}:32326" in said


def test_a_pipeline_over_two_machines_and_the_death_of_a_worker(two_machines: Cluster, wanted: list[int], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with two_machines.serve(block("Ray, two machines, pipeline parallelism", 2), log) as process:
        assert two_machines.complete()["token_ids"] == wanted
        assert json.loads(two_machines.run("h0", QUERY))["usage"]["completion_tokens"] == 16
        for stage in ("0/2 (is_first=True, is_last=False)", "1/2 (is_first=False, is_last=True)"):
            assert f"Pipeline stage {stage}" in log.read_text()
        ports = [f"tcp://{two_machines.machines[name].address}:{port}" for name, port in (("h0", 32323), ("h1", 32324))]
        assert f"stages hand on over {', '.join(ports)}" in log.read_text()
        [victim] = two_machines.workers("h1")
        os.kill(victim, signal.SIGKILL)
        process.wait(240)
        assert "died unexpectedly" in log.read_text()
        deadline = time.monotonic() + 30
        while two_machines.workers("h0") or two_machines.workers("h1"):
            assert time.monotonic() < deadline
            time.sleep(0.2)
        assert not two_machines.machines.processes("h0", "VLLM::")
