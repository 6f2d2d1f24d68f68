"""docs/vllm.md under Ray, as written: one machine, two machines, replicas; and what happens when something is missing.

Machines are network namespaces (tests/netns.py), each with a raylet of its own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm_helpers import START_S, VLLM

from netns import Machines, why_not

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=f"no machines to test on: {why_not()}"),
]

DOCS = Path(__file__).parents[2] / "docs" / "vllm.md"
SMALL = " --object-store-memory=100000000 --disable-usage-stats"
PROMPT = [50, 51, 52, 53]


def block(heading: str, number: int) -> str:
    """The `number`th shell block below `heading`."""
    section = DOCS.read_text().split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"```bash\n(.*?)```", section, re.DOTALL)[number]


class Cluster:
    """Machines with raylets, and `vllm serve` on the first."""

    def __init__(self, machines: Machines, model: Path) -> None:
        self.machines, self.model = machines, model
        for name in machines.names:
            (machines[name].home / "r").mkdir()
            machines.set_variables(
                name,
                {
                    "RAY_TMPDIR": str(machines[name].home / "r"),
                    "VLLM_NO_USAGE_STATS": "1",
                    "VLLM_HOST_IP": machines[name].address,
                },
            )

    def here(self, text: str) -> str:
        """A line of the documentation with this cluster's addresses, and a model that is here."""
        for documented, name in (("10.0.0.1", "h0"), ("10.0.0.2", "h1")):
            if name in self.machines.names:
                text = text.replace(documented, self.machines[name].address)
        text = re.sub(r"(Qwen/Qwen3-0.6B|mlx-community/Qwen3-8B-4bit)", str(self.model), text)
        text = text.replace("--max-model-len 8192", "").replace("vllm serve", "exec vllm serve --max-model-len 256")
        return text.replace("--resources='{\"mlx\": 1}'", "--resources='{\"mlx\": 1}'" + SMALL)

    def run(self, name: str, text: str) -> str:
        """Run a block to its end; its output."""
        done = self.machines.run(name, self.here(text), timeout=START_S, check=False)
        for _ in range(4):  # Ray gives its own start 30 s, and a busy machine may need more
            if done.returncode == 0 or "timed out during startup" not in done.stdout + done.stderr:
                break
            self.machines.run(name, "ray stop --force", timeout=START_S)
            done = self.machines.run(name, self.here(text), timeout=START_S, check=False)
        assert done.returncode == 0, f"{name}: {text}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @contextmanager
    def serve(self, text: str, log: Path) -> Iterator[subprocess.Popen[str]]:
        """Start the server that a block describes and wait until it is healthy."""
        with log.open("wb") as output:
            process = self.machines.start("h0", ["sh", "-c", self.here(text)], stdout=output, stderr=subprocess.STDOUT)
        try:
            deadline = time.monotonic() + START_S
            while not self.healthy():
                said = log.read_text(errors="replace")[-6000:]
                assert process.poll() is None and time.monotonic() < deadline, said
                time.sleep(0.5)
            yield process
        finally:
            if process.poll() is None:
                self.machines.signal(process, signal.SIGTERM)
                process.wait(90)

    @property
    def base(self) -> str:
        return f"http://{self.machines['h0'].address}:8000"

    def healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.base}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def complete(self) -> dict[str, Any]:
        body = {
            "model": str(self.model),
            "prompt": PROMPT,
            "max_tokens": 16,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self.base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as response:
            answer: dict[str, Any] = json.load(response)
        choice: dict[str, Any] = answer["choices"][0]
        return choice

    def workers(self, name: str) -> list[int]:
        """Process ids, here, of vLLM's actors on a machine."""
        return [
            pid
            for pid, line in self.machines.processes(name).items()
            if re.search(r"ray::(TandemRayWorkerProc|EngineCoreActor)", line)
        ]


@pytest.fixture(scope="module")
def wanted(tiny: Path) -> list[int]:
    from vllm_helpers import expected_tokens

    return expected_tokens(tiny, [PROMPT], 16)["served"][0]


@pytest.fixture
def one_machine(make_machines: Callable[[int], Machines], tiny: Path) -> Cluster:
    return Cluster(make_machines(1), tiny)


@pytest.fixture(scope="module")
def two_machines(tiny: Path) -> Iterator[Cluster]:
    with Machines(2) as machines:
        cluster = Cluster(machines, tiny)
        cluster.run("h0", block("Ray, two machines, pipeline parallelism", 0))
        cluster.run("h1", block("Ray, two machines, pipeline parallelism", 1))
        yield cluster


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
    words = [sys.executable, "-c", ROWS, str(Path(__file__).parent), str(cluster.model), json.dumps(options)]
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
    [script] = re.findall(r"```python\n(import ray\n.*?)```", DOCS.read_text(), re.DOTALL)
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
import json, sys
import ray
sys.path.insert(0, sys.argv[1])
from vllm_helpers import engine, generate
for address in sys.argv[4:]:
    ray.init(address=address)
    try:
        with engine(sys.argv[2], tensor_parallel_size=2, distributed_executor_backend="ray") as llm:
            print(json.dumps(generate(llm, [json.loads(sys.argv[3])], 16)))
    except Exception as error:
        print(address, error)
    ray.shutdown()
"""
"""The older page's example: a program that joins the cluster, and a model with a rank on each node."""


def test_tensor_parallelism_over_two_machines_after_ray_init(two_machines: Cluster, wanted: list[int]) -> None:
    first, second = (two_machines.machines[name].address for name in ("h0", "h1"))
    words = [str(Path(__file__).parent), str(two_machines.model), json.dumps(PROMPT), f"ray://{first}:10001", "auto"]
    done = two_machines.machines.run("h0", [sys.executable, "-c", OVER_TWO_NODES, *words], timeout=2 * START_S)
    said = done.stdout + done.stderr
    assert f'ray://{first}:10001 a Ray client (ray://) is no node: on a node use ray.init(address="auto")' in done.stdout
    assert json.loads(next(line for line in done.stdout.splitlines() if line.startswith("[["))) == [wanted], said[-6000:]
    assert f"MLX ring of stage 0: {first}:32325, {second}:32326" in said


def test_a_pipeline_over_two_machines_and_the_death_of_a_worker(two_machines: Cluster, wanted: list[int], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with two_machines.serve(block("Ray, two machines, pipeline parallelism", 2), log) as process:
        assert two_machines.complete()["token_ids"] == wanted
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
