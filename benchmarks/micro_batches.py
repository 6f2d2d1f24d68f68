"""A pipeline of two stages with two micro-batches against one: what independent batches in flight bring.

With one micro-batch a stage waits while the other works; with two both work at once. Decoding alone and serving mixes (prompts
and outputs together) are measured separately, in turns. Goal: 1.5 times the tokens per second for a serving mix. How
near a workload comes to 2 depends on what halving the batch saves: a prompt's computation is halved with it, but where
decoding waits for memory, 4 rows take nearly as long as 8, and micro-batches bring nothing (docs/performance.md).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import harness
import load
from against_mlx_lm_server import make_jobs


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=2)
    parser.add_argument("--stages", type=int, default=2, help="pipeline stages, and micro-batches of the better side")
    parser.add_argument("--concurrency", type=int, default=8, help="clients at once")
    parser.add_argument("--jobs-per-client", type=int, default=2, help="requests per client and round")
    parser.add_argument(
        "--mixes",
        nargs="+",
        default=["8-8/48-48", "100-300/32-64", "400-800/16-32"],
        help="workloads: shortest-longest prompt / shortest-longest output, in tokens; the first stands for decoding alone",
    )
    parser.add_argument("--prefill-chunk", type=int, help="setting of both sides, if not the default")
    args = parser.parse_args()
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    prompts = load.PromptSource(model)
    results: dict[str, Any] = {"mixes": [], "verdicts": []}
    common: dict[str, object] = {"pipeline_parallel_size": args.stages, "executor": "cluster"}
    if args.prefill_chunk:
        common["prefill_chunk"] = args.prefill_chunk
    with (
        harness.tandem_server(model, args.threads, f"{args.stages} micro-batches", micro_batches=args.stages, **common) as many,
        harness.tandem_server(model, args.threads, "1 micro-batch", micro_batches=1, **common) as one,
    ):
        for server in (many, one):
            load.closed_loop(server, make_jobs([50, 100], [8, 16], prompts, args.concurrency), args.concurrency)
        for number, mix in enumerate(args.mixes):
            _compare(args, (many, one), mix, prompts, decoding=number == 0, results=results)
    harness.write_json(args.json, args, results)


def _compare(
    args: argparse.Namespace,
    servers: Sequence[harness.Server],
    mix: str,
    prompts: load.PromptSource,
    *,
    decoding: bool,
    results: dict[str, Any],
) -> None:
    lengths, outputs = ([int(n) for n in part.split("-")] for part in mix.split("/"))
    rows: list[list[object]] = []
    ratios, busy = [], {server.name: Busy(server) for server in servers}

    def play() -> list[list[load.Timed]]:
        jobs = make_jobs(lengths, outputs, prompts, args.concurrency * args.jobs_per_client)
        answers = []
        for server in servers:
            with busy[server.name]:
                answers.append(load.closed_loop(server, jobs, args.concurrency))
        return answers

    with harness.heading(f"Prompts of {lengths[0]} to {lengths[1]} tokens, outputs of {outputs[0]} to {outputs[1]}"):
        for number, (answers, others) in enumerate(harness.rounds(args, play)):
            rates = [load.rate(one) for one in answers]
            waits = [harness.middle([a.ttft for a in one]) for one in answers]
            ratios.append(rates[0] / rates[1])
            rows.append([number + 1, *rates, ratios[-1], *waits, others])
        names = [server.name for server in servers]
        harness.table(
            ["round", *(f"{name} tok/s" for name in names), "ratio", *(f"{name} TTFT p50 s" for name in names), "others"], rows
        )
        print()
        shares = [[name, *one.shares()] for name, one in busy.items()]
        harness.table(["", *(f"stage {i + 1} works % of the time" for i in range(args.stages))], shares)
        ratio = harness.middle(ratios)
        if decoding:
            print(f"decoding alone, median of the rounds' ratios: {ratio:.3f} (no goal of its own)")
        else:
            results["verdicts"].append(harness.verdict(f"serving mix {mix}, median of the rounds' ratios", ratio, 1.5))
        results["mixes"].append({"mix": mix, "rounds": rows, "busy": shares})


class Busy:
    """Share of the time that each stage works, from the server's own metrics, summed over the blocks it is used for."""

    def __init__(self, server: harness.Server) -> None:
        self._server = server
        self._work: dict[str, float] = {}
        self._time = 0.0

    def __enter__(self) -> None:
        self._before, self._started = harness.metric(self._server, "tandem_rank_step_seconds_sum"), harness.now()

    def __exit__(self, *exc: object) -> None:
        self._time += harness.now() - self._started
        for rank, value in harness.metric(self._server, "tandem_rank_step_seconds_sum").items():
            self._work[rank] = self._work.get(rank, 0.0) + value - self._before.get(rank, 0.0)

    def shares(self) -> list[float]:
        """Percent, by rank."""
        return [100 * self._work[rank] / self._time for rank in sorted(self._work)]


if __name__ == "__main__":
    main()
