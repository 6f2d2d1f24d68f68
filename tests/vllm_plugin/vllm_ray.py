"""Ray over machines that are network namespaces (tests/netns.py), each with a raylet of its own, and vLLM on the first."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_helpers import START_S

from netns import Machines

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
