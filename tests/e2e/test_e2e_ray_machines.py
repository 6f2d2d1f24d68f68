"""`tandem serve --launcher ray` over machines with addresses of their own: wrong addresses, and a power cut."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from openai import OpenAI

from netns import Machines, sh
from served import wait_until
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

pytest.importorskip("ray")
pytestmark = pytest.mark.slow

RAY = [sys.executable, "-c", "from ray.scripts.scripts import main; main()"]
PROMPT = "once upon a time"
TOKENS = 400
"""So many that a machine can be switched off long before the last of them."""
START_S = 240.0


class Cluster:
    """`ray start` on machines; the first is the head."""

    def __init__(self, machines: Machines) -> None:
        self.machines = machines
        self.address = f"{machines['h0'].address}:6379"
        for name in machines.names:
            machines.set_variables(name, {"RAY_USAGE_STATS_ENABLED": "0", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"})

    def start(self, name: str, address: str, **resources: float) -> subprocess.Popen[str]:
        head = ["--head", "--port=6379", "--include-dashboard=false"]
        where = head if name == "h0" else [f"--address={self.address}"]
        log = self.machines[name].home / "ray.log"
        command = [
            *RAY,
            "start",
            "--block",
            *where,
            f"--node-ip-address={address}",
            "--num-cpus=1",
            "--num-gpus=0",
            f"--resources={json.dumps(resources)}",
            "--object-store-memory=80000000",
        ]
        for _ in range(5):  # Ray gives its own start 30 s, and a busy machine may need more
            with log.open("w") as output:
                process = self.machines.start(name, command, stdout=output, stderr=output)
            wait_until(lambda process=process: "Ray runtime started" in log.read_text() or process.poll() is not None)
            if process.poll() is None:
                return process
        raise AssertionError(log.read_text())

    def refused(self, name: str, *arguments: str) -> str:
        """The line with which `tandem serve` on that machine refuses."""
        done = self.machines.run(
            name,
            [sys.executable, "-m", "tandem", "serve", *arguments, "--launcher", "ray", "--ray-address", self.address],
            timeout=START_S,
            check=False,
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
        [line] = [line for line in done.stderr.splitlines() if line.startswith("tandem: ")]
        return line


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def cluster(make_machines: Callable[[int], Machines]) -> Cluster:
    """h0 is the head, h1 a node with a device; h2 is no node yet."""
    made = Cluster(make_machines(3))
    for name in ("h0", "h1"):
        made.start(name, made.machines[name].address, mlx=1)
    return made


def test_a_machine_that_is_no_node_is_told_so(cluster: Cluster, model: str) -> None:
    assert "this machine is no node of a Ray cluster" in cluster.refused("h2", model)


def test_an_address_of_another_network_is_named(cluster: Cluster, model: str) -> None:
    sh("ip", "-n", cluster.machines["h2"].namespace, "addr", "add", "192.168.77.2/24", "dev", "eth0")
    node = cluster.start("h2", "192.168.77.2", mlx=1)
    try:
        line = cluster.refused("h0", model, "-pp", "3")
    finally:
        cluster.machines.signal(node, signal.SIGTERM)
        node.wait(240)
    assert re.search(r"192\.168\.77\.2 \(h2\): .* advertises .*--node-ip-address", line), line


def test_a_power_cut_costs_a_pause(cluster: Cluster, model: str) -> None:
    machines = cluster.machines
    with LLM(model) as llm:
        expected = llm.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True))[0].text
    log: Path = machines["h0"].home / "serve.log"
    with log.open("w") as output:
        server = machines.start(
            "h0",
            [
                sys.executable,
                "-m",
                "tandem",
                "serve",
                model,
                "--launcher",
                "ray",
                "-pp",
                "2",
                "--ray-address",
                cluster.address,
                "--host",
                machines["h0"].address,
            ],
            stdout=output,
            stderr=output,
        )
    wait_until(lambda: "Tandem is ready" in log.read_text() or server.poll() is not None)
    assert server.poll() is None, log.read_text()
    cluster.start("h2", machines["h2"].address, mlx=1)
    client = OpenAI(base_url=f"http://{machines['h0'].address}:8000/v1", api_key="none", max_retries=0, timeout=240)
    text = ""
    for chunk in client.completions.create(
        model="default", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ):
        if not text:
            machines.power_off("h1")
        text += chunk.choices[0].text
    assert text == expected, log.read_text()
    assert f"ranks go to Ray nodes {machines['h0'].address} (h0), {machines['h2'].address} (h2)" in log.read_text()
    machines.signal(server, signal.SIGTERM)
    assert server.wait(240) == 0
    for name in ("h0", "h2"):
        assert not machines.processes(name, "tandem"), log.read_text()
