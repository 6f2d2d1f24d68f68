"""vllm-metal's older page on Ray: its commands, item by item, and those that are printed there."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
from vllm_helpers import START_S
from vllm_ray import DOCS as VLLM_PAGE
from vllm_ray import Cluster

from netns import why_not

WORKS = [
    (
        '`LLM(model=..., max_model_len=4096, distributed_executor_backend="ray")`, `llm.generate(["Hello, world!"], '
        "SamplingParams(max_tokens=100))`, `outputs[0].outputs[0].text`",
        "the same with the [plugin](vllm.md). Without vLLM `from tandem import LLM, SamplingParams`: `LLM(model, "
        'max_context=4096, launcher="ray")`, `outputs[0].text` ([Python](python.md))',
        "test_after_ray_init",
    ),
    (
        "`ray start --head --port=6379` on the first machine, `ray start --address='192.168.1.100:6379'` on others",
        "the same, with `--resources='{\"mlx\": 1}'` off Apple silicon",
        "tests/seeds/test_seeds_vllm_metal.py::test_a_pipeline_over_two_machines_and_the_death_of_a_worker",
    ),
    (
        '`LLM(model=..., tensor_parallel_size=2, distributed_executor_backend="ray")` over two nodes',
        'the same; `LLM(model, tensor_parallel_size=2, launcher="ray")`',
        "tests/seeds/test_seeds_vllm_metal.py::test_tensor_parallelism_over_two_machines_after_ray_init",
    ),
    ("`vllm serve MODEL --distributed-executor-backend ray --max-model-len 4096`", "the same", "test_the_recipe_for_127_0_0_1"),
    (
        "`ray stop -f`, `ray start --head --node-ip-address=127.0.0.1 --port=6379 --disable-usage-stats`, "
        "`VLLM_HOST_IP=127.0.0.1 vllm serve HuggingFaceTB/SmolLM2-135M --port 8000 --distributed-executor-backend "
        "ray`",
        "the same, with `--resources='{\"mlx\": 1}'` for `ray start` off Apple silicon; without it `vllm serve` ends "
        "with that advice",
        "test_the_recipe_for_127_0_0_1",
    ),
    (
        "the same with the machine's own address, 192.168.1.10",
        "the same",
        "tests/seeds/test_seeds_vllm_metal.py::test_one_machine",
    ),
    ("`RAY_ADDRESS`", "the same", "tests/seeds/test_seeds_vllm_metal.py::test_one_machine"),
    (
        "`python -c \"import ray; ray.init(address='auto'); print([n['NodeManagerAddress'] for n in ray.nodes() if "
        "n.get('Alive')])\"`",
        "the same; what is wrong with a node is said when ranks are placed",
        "tests/seeds/test_seeds_vllm_metal.py::test_one_machine",
    ),
    (
        "`ray status`",
        "the same; `GET /health` lists ranks, `GET /v1/status` shows the engine",
        "tests/seeds/test_seeds_vllm_metal.py::test_one_machine",
    ),
    (
        "`spawn` instead of `fork`, against crashes",
        "the same: processes are started afresh",
        "tests/vllm_plugin/test_vllm_plugin_layouts.py::test_greedy_tokens_of_a_layout",
    ),
    (
        "several nodes, advanced layouts, production and automatic resources: not yet",
        "several nodes, TP x PP x DP, [services](operate.md), Ray's `GPU` where `mlx` is missing",
        "tests/seeds/test_seeds_vllm_metal.py::test_devices_are_counted_once_and_what_is_missing_is_named_at_once",
    ),
]
"""What is printed there, what does it here, and the test that shows it (of this file, where none is named)."""

DIFFERS = [
    (
        "`pip install vllm-metal[ray]`",
        "`pip install '.[ray]'` in a checkout on every machine, or the wheel that `make release` makes",
        "`mlx-tandem` is not in the registry yet",
    ),
    (
        "`ray.init()`, then `LLM(...)`: Ray is used without being asked for",
        'only with `distributed_executor_backend="ray"`, also under the plugin',
        "a program may use Ray for something else; one rank needs none",
    ),
    (
        '`ray.init(address="ray://192.168.1.100:10001")`',
        'refused in a sentence, also under the plugin: `ray.init(address="auto")` on a machine of the cluster, or `RAY_ADDRESS`',
        "Ray's client is no node of the cluster, so no rank could run beside it",
    ),
    (
        "`--resources='{\"METAL\": 1}'`",
        "refused in a sentence off Apple silicon: the resource is `mlx`",
        "one name for a device: what is counted under two could be used twice",
    ),
    (
        "`ray start --head` without a resource; `CPU` for placement",
        "Ray's `GPU` counts on Apple silicon; elsewhere refused with the line for `ray start`",
        "a CPU is no device for a rank, and says nothing of how many there are",
    ),
    (
        "`KeyError: 'METAL'`, `Use the 'num_cpus' and 'num_gpus' keyword`",
        "cannot happen",
        "the worker asks Ray for the resource by its name",
    ),
    (
        "placement hangs where Ray and vLLM use different addresses",
        "ends within seconds with the value for `VLLM_HOST_IP`",
        "a start that cannot succeed should not wait",
    ),
    ("Gloo between tensor-parallel ranks", "an MLX ring", "MLX sums on the device's own arrays"),
    (
        "`max_model_len=`, `gpu_memory_utilization=`, `max_num_seqs=`, `max_num_batched_tokens=`",
        "the same under the plugin. `tandem.LLM` has `max_context=`, `memory_fraction=`, `max_batch_size=`, `prefill_chunk=`",
        "the last counts prompt tokens alone, and a context is each request's",
    ),
]
"""What is printed there, what there is here, and why it differs."""

ONLY_A_MAC = [
    ("`ipconfig getifaddr en0`", "macOS's own command; `ip addr` elsewhere"),
    (
        "`Failed to connect to GCS`, metrics agent errors, segmentation faults",
        "faults of Ray and of Metal on macOS; nothing here can cause or cure them",
    ),
    (
        "models of `mlx-community` with 1 to 70 billion parameters",
        "tests never reach a hub; `tandem plan` has them among its presets",
    ),
]
"""What Linux cannot show, and what is done instead."""

pytest.importorskip("vllm")

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"no machines to test on: {why_not()}"),
]


def test_the_recipe_for_127_0_0_1(one_machine: Cluster, wanted: list[int], tmp_path: Path) -> None:
    """As vllm-metal's page has it, which names no resource: on a Mac Ray's GPU is one, elsewhere it must be given."""
    serve = "VLLM_HOST_IP=127.0.0.1 vllm serve Qwen/Qwen3-0.6B --port 8000 --distributed-executor-backend ray"
    start = "ray start --head --node-ip-address=127.0.0.1 --port=6379 --disable-usage-stats"
    small = " --include-dashboard=false --object-store-memory=100000000"
    one_machine.run("h0", f"ray stop -f\n{start}{small} --num-gpus=0")
    done = one_machine.machines.run("h0", one_machine.here(serve), timeout=START_S, check=False)
    assert done.returncode == 1
    advice = done.stderr.splitlines()[-1]
    assert advice.startswith("vllm: the layout needs 1 of the Ray resource 'mlx'"), done.stderr[-3000:]
    [resource] = re.findall(r"start each node with ray start \.\.\. (--resources=.*)$", advice)
    one_machine.run("h0", f"ray stop -f\n{start}{small} {resource}")
    with one_machine.serve(serve, tmp_path / "log") as process:
        assert one_machine.complete()["token_ids"] == wanted
        one_machine.machines.signal(process, signal.SIGTERM)
        assert process.wait(START_S) == 0, (tmp_path / "log").read_text(errors="replace")[-6000:]


def test_after_ray_init(one_machine: Cluster) -> None:
    [script] = re.findall(r"```python\n(import ray\n.*?)```", VLLM_PAGE.read_text(), re.DOTALL)
    script = one_machine.here(script).replace("max_model_len=4096", "max_model_len=256")
    script = script.replace("ray.init(", "ray.init(include_dashboard=False, object_store_memory=100_000_000, ")
    assert script.count("resources=") == 1 and str(one_machine.model) in script
    imports, rest = script.split("\nllm = ")
    alone = (
        f"alone = LLM(model={str(one_machine.model)!r}, max_model_len=256)\n"  # nobody asks for Ray here
        "print('alone', alone.generate(['Hello'])[0].finished, flush=True)"
    )
    done = one_machine.machines.run("h0", [sys.executable, "-c", f"{imports}\n{alone}\nllm = {rest}"], timeout=START_S)
    before, _, after = done.stdout.partition("alone True")
    assert "RayWorkerProc (custom Ray resource mlx)" in after and "RayWorkerProc" not in before
    bare = script.replace('resources={"mlx": 1}', 'resources={"METAL": 1}')  # as an older page has it
    done = one_machine.machines.run("h0", [sys.executable, "-c", bare], timeout=START_S, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("tandem.errors.UsageError: the layout needs 1 of the Ray resource 'mlx'")
    assert 'give ray.init(resources={"mlx": 1}), or start each node with ray start' in done.stderr
