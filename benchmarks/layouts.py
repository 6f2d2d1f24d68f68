"""Parallel layouts side by side, one thread a rank: tensor parallelism against one rank, replicas against one replica,
and tensor parallelism against `mlx.launch -n 2 mlx_lm.server` on the same weights.

Every side serves HTTP and gets the same requests in turns. Goals for two ranks: decoding 1.4 times and prompts 1.6
times as fast as one rank, two replicas 1.8 times the throughput of one at 8 clients, and 1.2 times that of mlx-lm's
server over two ranks. The control plane's share is what a step of the rank group takes beyond the work of its slowest rank.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack, nullcontext
from typing import Any

import harness
import load
from against_mlx_lm_server import make_jobs


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="ring", choices=("ring", "nccl"), help="between the ranks of a stage")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of the prompt whose speed is measured")
    parser.add_argument("--output", type=int, default=48, help="tokens of each decoded answer")
    parser.add_argument("--concurrency", type=int, default=8, help="clients for throughput")
    parser.add_argument(
        "--mix",
        type=int,
        nargs=4,
        metavar=("FROM", "TO", "FROM", "TO"),
        default=[256, 512, 16, 32],
        help="tokens of prompts and of outputs for throughput, drawn evenly",
    )
    parser.add_argument("--parts", nargs="+", default=["tp", "dp", "peer"], choices=("tp", "dp", "peer"))
    args = parser.parse_args()
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    prompts = load.PromptSource(model)
    results: dict[str, Any] = {"verdicts": []}
    common = {"executor": "cluster", "prefix_cache": 0.0}
    tp = {"tensor_parallel_size": args.ranks, "backend": args.backend, **common}
    with ExitStack() as stack:
        one = stack.enter_context(harness.tandem_server(model, args.threads, "1 rank", **common))
        if {"tp", "peer"} & set(args.parts):
            divided = stack.enter_context(harness.tandem_server(model, args.threads, f"TP {args.ranks}", **tp))
        if "tp" in args.parts:
            _tensor_parallel(args, divided, one, prompts, results)
        if "dp" in args.parts:
            with replicas(args, model) as many:
                _throughput(args, many, one, prompts, 1.8, results)
        if "peer" in args.parts:
            with launched_peer(args, model) as peer:
                _throughput(args, divided, peer, prompts, 1.2, results, pause=True)
    harness.write_json(args.json, args, results)


def replicas(args: argparse.Namespace, model: Any) -> harness.Server:
    """`tandem serve` with as many replicas as ranks."""
    port = harness.free_port()
    command = [
        sys.executable,
        "-P",
        "-m",
        "tandem",
        "serve",
        str(model),
        "--port",
        str(port),
        "--data-parallel-size",
        str(args.ranks),
        "--threads-per-rank",
        str(args.threads),
        "--dequantize",
        "no",
        "--prefix-cache",
        "0",
    ]
    environment = harness.child_environment(harness.threads_environment(args.threads))
    return harness.Server(f"DP {args.ranks}", [command], environment, port=port, health="/health/ready", model="default")


def launched_peer(args: argparse.Namespace, model: Any) -> harness.Server:
    """mlx-lm's server under mlx.launch, which shards the model over the ranks."""
    port = harness.free_port()
    launch = "from mlx._distributed_utils.launch import main; main()"
    command = [
        sys.executable,
        "-P",
        "-c",
        launch,
        "-n",
        str(args.ranks),
        "--backend",
        args.backend,
        "--",
        sys.executable,
        "-P",
        "-m",
        "mlx_lm",
        "server",
        "--model",
        str(model),
        "--port",
        str(port),
        "--log-level",
        "ERROR",
    ]
    return harness.Server(
        "mlx.launch mlx_lm.server",
        [command],
        harness.peer_environment(args, harness.on_gpu()),
        port=port,
        health="/health",
        model="default_model",
    )


def _tensor_parallel(
    args: argparse.Namespace, many: harness.Server, one: harness.Server, prompts: load.PromptSource, results: dict[str, Any]
) -> None:
    rows: list[list[object]] = []
    decode, prefill = [], []

    def play() -> list[list[float]]:
        job = load.BenchRequest(prompts.make(8), args.output)
        long = load.BenchRequest(prompts.make(args.prompt), 1)
        return [[load.one(server, job).decode_rate, load.one(server, long).ttft] for server in (many, one)]

    play()
    with harness.heading(f"{many.name} against {one.name}: one stream"):
        for number, (measured, others) in enumerate(harness.rounds(args, play)):
            decode.append(measured[0][0] / measured[1][0])
            prefill.append(measured[1][1] / measured[0][1])
            rows.append(
                [
                    number + 1,
                    measured[0][0],
                    measured[1][0],
                    decode[-1],
                    args.prompt / measured[0][1],
                    args.prompt / measured[1][1],
                    prefill[-1],
                    others,
                ]
            )
        names = (many.name, one.name)
        harness.table(
            [
                "round",
                *(f"{name} decode tok/s" for name in names),
                "ratio",
                *(f"{name} prompt tok/s" for name in names),
                "ratio",
                "others",
            ],
            rows,
        )
    results["tensor parallel"] = rows
    results["verdicts"] += [
        harness.verdict("decode, median of the rounds' ratios", harness.middle(decode), 1.4),
        harness.verdict("prompts, median of the rounds' ratios", harness.middle(prefill), 1.6),
    ]
    _control_plane(args, many, prompts, results)


def _control_plane(args: argparse.Namespace, server: harness.Server, prompts: load.PromptSource, results: dict[str, Any]) -> None:
    """What the engine, the bus and the wait for plans add to a step of one stream."""
    work = _work(server)
    answer = load.one(server, load.BenchRequest(prompts.make(8), 4 * args.output))
    steps = _work(server)
    slowest = max((steps[rank][0] - work[rank][0]) / (steps[rank][1] - work[rank][1]) for rank in steps)
    share = 1 - slowest * answer.decode_rate
    results["verdicts"].append(harness.verdict(f"control plane, share of a step of {server.name}", share, 0.03, at_most=True))


def _work(server: harness.Server) -> dict[str, tuple[float, float]]:
    """(seconds of work, steps) of each rank so far."""
    seconds = harness.metric(server, "tandem_rank_step_seconds_sum")
    counts = harness.metric(server, "tandem_rank_step_seconds_count")
    return {rank: (seconds[rank], counts[rank]) for rank in seconds}


def _throughput(
    args: argparse.Namespace,
    mine: harness.Server,
    other: harness.Server,
    prompts: load.PromptSource,
    goal: float,
    results: dict[str, Any],
    *,
    pause: bool = False,
) -> None:
    rows: list[list[object]] = []
    ratios = []

    def play() -> list[float]:
        jobs = make_jobs(args.mix[:2], args.mix[2:], prompts, 2 * args.concurrency)
        # Idle ranks of mlx-lm wait in a collective, which would take a core from the side that is measured.
        with other.paused() if pause else nullcontext():
            first = load.rate(load.closed_loop(mine, jobs, args.concurrency))
        return [first, load.rate(load.closed_loop(other, jobs, args.concurrency))]

    play()
    with harness.heading(f"{mine.name} against {other.name}: {args.concurrency} clients"):
        for number, (rates, others) in enumerate(harness.rounds(args, play)):
            ratios.append(rates[0] / rates[1])
            rows.append([number + 1, *rates, ratios[-1], others])
        harness.table(["round", f"{mine.name} tok/s", f"{other.name} tok/s", "ratio", "others"], rows)
    results[f"{mine.name} against {other.name}"] = rows
    results["verdicts"].append(
        harness.verdict(f"{mine.name} against {other.name}, median of the rounds' ratios", harness.middle(ratios), goal)
    )


if __name__ == "__main__":
    main()
