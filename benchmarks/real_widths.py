"""Published models at their real widths, cut to a few layers, over two stages: memory as planned, logits as mlx-lm's.

For each model: random weights are written; two ranks load them, compute a long prompt and decode; what each of them
holds is compared with what the planner says of these layers, and the log probabilities of its tokens with those of
mlx-lm's own forward pass in another process, which is given the same tokens. What MLX lacks on this device is found
out first, and written down beside each result; without quantised products the weights are bfloat16.

Each model has processes of its own and a deadline. Its result is appended to --out, a line of JSON, as soon as it is
there. The exit code is 0 if all went well, 1 if not, 2 for wrong options.

    python benchmarks/real_widths.py --out results.jsonl --gpus 0 1
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from wide_model import CASES, cut, write

from tandem.env import child_environment

TOP = 20
"""Log probabilities that are compared for each token."""
NEAR = 0.1
"""Most that they may differ on average: bfloat16 has steps of 1/64 where logits are, and experts that lie side by side
are chosen either way. What is computed wrongly is off by more than 1."""
SHARE = 0.10
"""Most that a rank's memory may differ from the plan."""
PROBE_S = 120.0
FAILED = "error"


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models",
        nargs="+",
        choices=sorted(CASES),
        default=list(CASES),
        metavar="MODEL",
        help=f"which (default: all: {', '.join(CASES)})",
    )
    parser.add_argument("--out", type=Path, help="file to append results to, a line of JSON each")
    parser.add_argument(
        "--gpus",
        nargs="+",
        default=[""],
        metavar="GPU",
        help="CUDA_VISIBLE_DEVICES of what runs side by side, such as 0 1, or 0 0 for two models at "
        "once on one GPU; both stages of a model share it (default: one model at a time)",
    )
    parser.add_argument("--deadline", type=float, default=150.0, help="seconds for a model (default: %(default)s)")
    parser.add_argument("--total", type=float, default=450.0, help="seconds for all (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=2000, help="tokens of the prompt (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to decode (default: %(default)s)")
    parser.add_argument(
        "--quant",
        choices=("auto", "4bit", "8bit", "bf16"),
        default="auto",
        help="auto: 4bit, or bf16 where MLX cannot multiply packed experts (default: %(default)s)",
    )
    parser.add_argument("--short", action="store_true", help="two layers of each model; with bf16 always")
    parser.add_argument("--shrink", type=int, default=1, help="divide the widths, to try this out without a GPU")
    parser.add_argument("--directory", type=Path, help="where to write weights (default: where there is room)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--runtime", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--reference", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--probe", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.probe:
        return probe()
    if args.reference:
        return reference(args)
    if args.case:
        return case(args)
    if args.prompt < 2 or args.tokens < 2:
        parser.error("--prompt and --tokens must be at least 2")
    return drive(args)


# ---- the driver, which never imports mlx


class Results:
    """Rows, appended to a file one by one."""

    def __init__(self, path: Path | None) -> None:
        self._path, self._lock = path, threading.Lock()
        self.rows: list[dict[str, Any]] = []

    def add(self, row: dict[str, Any]) -> None:
        """Write it down now."""
        with self._lock:
            self.rows.append(row)
            line = json.dumps(row)
            print(line, flush=True)
            if self._path is not None:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
                    file.flush()
                    os.fsync(file.fileno())


def drive(args: argparse.Namespace) -> int:
    """All models, so many at once as there are entries of --gpus."""
    end, results = time.monotonic() + args.total, Results(args.out)
    found = watched([sys.executable, __file__, "--probe"], environment(args.gpus[0]), PROBE_S)
    results.add({"kind": "probe", **found})
    args.runtime = int(found.get("runtime", 0))
    if args.quant == "auto":
        args.quant = "4bit" if found.get("quantized_matmul 4bit") == found.get("gather_qmm 4bit") == "ok" else "bf16"
    todo: queue.SimpleQueue[str] = queue.SimpleQueue()
    for name in args.models:
        todo.put(name)
    threads = [threading.Thread(target=work, args=(args, gpu, todo, results, end)) for gpu in args.gpus]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    models = [row for row in results.rows if row["kind"] == "model"]
    good = sum(bool(row.get("ok")) for row in models)
    print(f"{good} of {len(args.models)} models are as planned and as mlx-lm computes them", flush=True)
    return 0 if good == len(args.models) else 1


def work(args: argparse.Namespace, gpu: str, todo: queue.SimpleQueue[str], results: Results, end: float) -> None:
    """One model after the other on one GPU."""
    while True:
        try:
            name = todo.get_nowait()
        except queue.Empty:
            return
        limit = min(args.deadline, end - time.monotonic())
        if limit < 5:
            results.add({"kind": "model", "model": name, "ok": False, FAILED: "no time was left: --total is over"})
            continue
        with weights_directory(args.directory) as directory:
            command = [
                sys.executable,
                __file__,
                "--case",
                name,
                "--directory",
                str(directory),
                "--quant",
                args.quant,
                "--prompt",
                str(args.prompt),
                "--tokens",
                str(args.tokens),
                "--shrink",
                str(args.shrink),
                "--runtime",
                str(args.runtime),
                *(["--short"] if args.short or args.quant == "bf16" else []),
            ]
            started = time.monotonic()
            row = watched(command, environment(gpu), limit)
        results.add(
            {"kind": "model", "model": name, "gpu": gpu, "ok": False, **row, "seconds": round(time.monotonic() - started, 1)}
        )


def environment(gpu: str) -> dict[str, str]:
    """Variables of a model's processes."""
    return child_environment({"HF_HUB_OFFLINE": "1", **({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})})


@contextlib.contextmanager
def weights_directory(parent: Path | None) -> Iterator[Path]:
    """A directory that is gone afterwards: in memory if most of it is free, else among temporary files."""
    if parent is None:
        shared = Path("/dev/shm")
        roomy = shared.is_dir() and os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 60 * 2**30
        parent = shared if roomy else Path(tempfile.gettempdir())
    with tempfile.TemporaryDirectory(prefix="tandem-wide-", dir=parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def watched(command: Sequence[str], env: dict[str, str], limit: float) -> dict[str, Any]:
    """Run a command that prints facts as lines of JSON; all it told, and why it ended if not in good order."""
    facts: dict[str, Any] = {}
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=log, stdin=subprocess.DEVNULL, env=env, start_new_session=True, text=True
        )
        late = threading.Event()

        def end() -> None:
            late.set()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(limit, end)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                with contextlib.suppress(ValueError):
                    told = json.loads(line)
                    facts.update(told if isinstance(told, dict) else {})
            code = process.wait()
        finally:
            timer.cancel()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        if late.is_set():
            facts[FAILED] = f"not done within {limit:.0f} s, while: {facts.get('doing', 'starting')}"
        elif code and FAILED not in facts:
            log.seek(0)
            lines = " | ".join(line.strip() for line in log.read().splitlines()[-3:])
            facts[FAILED] = f"ended with {code} while {facts.get('doing', 'starting')}: {lines[-800:]}"
    return facts


def tell(**facts: Any) -> None:
    """Hand facts to the driver."""
    print(json.dumps(facts), flush=True)


# ---- what MLX can do here


def probe() -> int:
    """Try the operations that these models need; a line for each."""
    import mlx.core as mx

    info = mx.device_info()
    tell(
        device=str(info.get("device_name", mx.default_device())),
        mlx=mx.__version__,
        cuda=mx.cuda.is_available(),
        metal=mx.metal.is_available(),
    )
    mx.eval(mx.ones(1))
    tell(runtime=runtime_bytes())
    x, w = mx.random.normal((4, 256)).astype(mx.bfloat16), mx.random.normal((8, 128, 256)).astype(mx.bfloat16)
    rows = mx.array([[0, 3], [1, 2], [7, 7], [5, 0]], dtype=mx.uint32)

    def packed(bits: int, mode: str = "affine", group: int = 64) -> Any:
        return mx.quantize(w, group_size=group, bits=bits, mode=mode), {"group_size": group, "bits": bits, "mode": mode}

    def qmm(bits: int, mode: str = "affine", group: int = 64) -> Any:
        parts, how = packed(bits, mode, group)
        return mx.quantized_matmul(x, *[part[0] for part in parts], transpose=True, **how)

    def gather(bits: int, mode: str = "affine", group: int = 64) -> Any:
        parts, how = packed(bits, mode, group)
        return mx.gather_qmm(x[:, None, None], *parts, rhs_indices=rows, transpose=True, **how)

    def attend(width: int, values: int) -> Any:
        q = mx.random.normal((1, 8, 16, width)).astype(mx.bfloat16)
        v = mx.random.normal((1, 8, 16, values)).astype(mx.bfloat16)
        return mx.fast.scaled_dot_product_attention(q, q, v, scale=0.1, mask="causal")

    trials = {
        "quantized_matmul 4bit": lambda: qmm(4),
        "gather_qmm 4bit": lambda: gather(4),
        "quantized_matmul 8bit": lambda: qmm(8),
        "gather_qmm 8bit": lambda: gather(8),
        "gather_qmm mxfp4": lambda: gather(4, "mxfp4", 32),
        "gather_qmm nvfp4": lambda: gather(4, "nvfp4", 16),
        "gather_mm bfloat16": lambda: mx.gather_mm(x[:, None, None], w.swapaxes(-1, -2), rhs_indices=rows),
        "attention 192 and 128": lambda: attend(192, 128),
        "attention 256": lambda: attend(256, 256),
        "attention 512": lambda: attend(512, 512),
        "depthwise conv1d": lambda: mx.conv1d(x[None], mx.ones((256, 4, 1), mx.bfloat16), groups=256),
        "argpartition": lambda: mx.argpartition(x, kth=8, axis=-1),
    }
    for name, trial in trials.items():
        tell(doing=name)
        try:
            mx.eval(trial())
            tell(**{name: "ok"})
        except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:  # as which C++ exceptions come
            tell(**{name: " ".join(str(error).split())[:200]})
    tell(doing="done")
    return 0


def runtime_bytes() -> int:
    """What CUDA takes of the GPU for this process, which has computed nothing yet, by nvidia-smi; 0 without one."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    with contextlib.suppress(OSError):
        for line in subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines():
            pid, _, used = line.partition(",")
            if pid.strip() == str(os.getpid()) and used.strip().isdigit():
                return int(used) * 2**20
    return 0


# ---- one model


def case(args: argparse.Namespace) -> int:
    """Write it, serve it over two stages, and compare."""
    import numpy as np

    model = cut(args.case, short=args.short, shrink=args.shrink)
    path = args.directory / args.case
    tell(layers=model.layers, quant=args.quant, doing="writing weights")
    started = time.monotonic()
    size = write(model.config, path, args.quant)
    tell(weights_gib=round(size / 2**30, 2), write_s=round(time.monotonic() - started, 1), doing="serving")
    rng = np.random.default_rng(11)
    prompt = [int(token) for token in rng.integers(3, 1000, args.prompt)]
    (args.directory / "prompt.json").write_text(json.dumps(prompt))
    command = [sys.executable, __file__, "--reference", str(path), "--directory", str(args.directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        try:
            served, ranks = serve(path, prompt, args.tokens)
            tell(tokens=[one.token for one in served][:8], doing="comparing with mlx-lm")
            asked = [{"token": one.token, "top": [token for token, _ in one.top]} for one in served]
            answer, _ = other.communicate(json.dumps(asked))
        finally:
            other.kill()
    if other.returncode or not answer:
        tell(error=f"mlx-lm's own forward pass ended with {other.returncode}")
        return 1
    theirs = json.loads(answer.splitlines()[-1])
    wrong = [
        abs(logprob - known)
        for one, row in zip(served, theirs["top"], strict=True)
        for (_, logprob), known in zip(one.top, row, strict=True)
    ]
    first, same = wrong[:TOP], [one.token == token for one, token in zip(served, theirs["best"], strict=True)]
    memory = plan_against(model, path, ranks, args)
    agrees = max(sum(first) / TOP, sum(wrong) / len(wrong)) <= NEAR
    tell(
        ok=agrees and all(one["ok"] for one in memory),
        logits_ok=agrees,
        memory_ok=all(one["ok"] for one in memory),
        logprob_first_mean=sum(first) / TOP,
        logprob_first_max=max(first),
        logprob_mean=sum(wrong) / len(wrong),
        logprob_max=max(wrong),
        same_greedy=f"{sum(same)} of {len(same)}",
        spread=theirs["spread"],
        reference_peak=theirs["peak"],
        ranks=memory,
        doing="done",
    )
    return 0


def serve(path: Path, prompt: list[int], count: int) -> tuple[Any, list[dict[str, Any]]]:
    """Log probabilities of greedy tokens over two stages, and what the ranks said of their memory, at most."""
    import mlx.core as mx

    from tandem import LLM, SamplingParams
    from tandem.engine.engine import Engine

    gpu = mx.default_device().type == mx.DeviceType.gpu
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, logprobs=TOP)
    held: dict[int, int] = {}
    started = time.monotonic()
    with LLM(
        str(path),
        pipeline_parallel_size=2,
        kv_tokens=len(prompt) + count + 64,
        prefix_cache=0.0,
        self_check=False,
        prefill_chunk=512,
        max_batch_size=1,
        dtype="bfloat16" if gpu else "float32",
        dequantize="no",
        max_context=len(prompt) + count,
        max_restarts=0,
    ) as llm:
        tell(load_s=round(time.monotonic() - started, 1), doing="computing the prompt over two stages")
        over = threading.Event()

        def look() -> None:
            while not over.wait(0.05):
                status = llm._session.engine.call(Engine.status).result()
                held.update({one.rank: max(one.kv_bytes, held.get(one.rank, 0)) for one in status.ranks})

        looking = threading.Thread(target=look)
        looking.start()
        started = time.monotonic()
        try:
            [output] = llm.generate([prompt], params)
        finally:
            over.set()
            looking.join()
        tell(compute_s=round(time.monotonic() - started, 1))
        status = llm._session.engine.call(Engine.status).result()
    return output.logprobs, [
        {
            "rank": one.rank,
            "layers": list(one.layers),
            "weights": one.weight_bytes,
            "cache": held.get(one.rank, 0),
            "peak": one.peak_bytes,
        }
        for one in status.ranks
    ]


def plan_against(model: Any, path: Path, ranks: list[dict[str, Any]], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each rank's memory, and what the planner says of its layers. What a rank holds must be near that; the most of
    MLX's arrays, with what the GPU's own library takes for a process, must not be beyond."""
    import mlx.core as mx

    from tandem.checkpoints.resolve import resolve
    from tandem.models.description import describe
    from tandem.planner.cost import Costs, RankShare
    from tandem.planner.hardware import Machine
    from tandem.planner.types import Request

    gpu = mx.default_device().type == mx.DeviceType.gpu
    planned = model.planned(args.quant)
    description = describe(resolve(str(path))) if args.shrink > 1 else planned.description
    machine = Machine(name="here", memory=2**40, bandwidth=1e12, flops=1e14, gpu=gpu)
    request = Request(
        context=args.prompt + args.tokens, prefill_chunk=512, dequantize="no", dtype="bfloat16" if gpu else "float32"
    )
    costs, whole = Costs(description, [machine], [], request, planned.experts), RankShare(0, 1.0, 1.0)
    rows = []
    for rank in ranks:
        start, stop = rank["layers"]
        plan = {"weights": int(costs.weights(whole, start, stop)), "cache": int(costs.kv(whole, stop - start, 1))}
        room = int(costs.headroom(whole, 1, last=stop == description.num_layers, alone=stop - start == 1))
        holds = (rank["weights"] + rank["cache"]) / (plan["weights"] + plan["cache"])
        most = (rank["peak"] + args.runtime) / (plan["weights"] + plan["cache"] + room)
        ok = abs(holds - 1) <= SHARE and most <= 1 + SHARE
        rows.append(
            {
                **rank,
                "planned": {**plan, "headroom": room},
                "runtime": args.runtime,
                "holds": round(holds, 4),
                "peak_of_plan": round(most, 4),
                "ok": ok,
            }
        )
    return rows


def reference(args: argparse.Namespace) -> int:
    """mlx-lm's own forward pass over the prompt, and over the tokens that come on standard input."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    from tandem.loading.seams import split_by_slices

    split_by_slices()  # or what it computes on an NVIDIA GPU is wrong at times, as what a rank computed would be
    model, _ = load_model(args.reference)
    if mx.default_device().type == mx.DeviceType.cpu:
        model.set_dtype(mx.float32)
    prompt = json.loads((args.directory / "prompt.json").read_text())
    caches = make_prompt_cache(model)
    for start in range(0, len(prompt), 512):
        logits = model(mx.array([prompt[start : start + 512]]), cache=caches)[:, -1]
        mx.eval([cache.state for cache in caches], logits)
    top, best = [], []
    for step in json.loads(sys.stdin.read()):
        logits = logits.astype(mx.float32)
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        top.append(logprobs[0, mx.array(step["top"])].tolist())
        best.append(int(mx.argmax(logprobs[0])))
        spread = float(mx.sqrt(mx.var(logits)))
        logits = model(mx.array([[step["token"]]]), cache=caches)[:, -1]
    print(json.dumps({"top": top, "best": best, "spread": round(spread, 2), "peak": int(mx.get_peak_memory())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
