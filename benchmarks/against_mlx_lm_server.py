"""Tandem's server against `mlx_lm.server` under many streams: throughput, and the wait when a long prompt arrives.

Both serve the same unquantised copy of the model and get the same requests in turns, from clients that each send their
next request when the last is answered; all prompts differ from the first token on, so no prefix cache helps. Goals: at
least 1.2 times the tokens per second, and a lower 99th percentile of the time to first token among requests that run
while a long prompt is computed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import harness
import load

from tandem.bench.summary import percentile


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=2)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[8, 16], help="clients at once")
    parser.add_argument("--jobs-per-client", type=int, default=2, help="requests per client and round")
    parser.add_argument("--prompt-tokens", type=int, nargs=2, default=[16, 256], help="shortest and longest prompt")
    parser.add_argument("--max-tokens", type=int, nargs=2, default=[16, 80], help="shortest and longest output")
    parser.add_argument("--long-prompt", type=int, default=1500, help="tokens of the long prompt; 0 leaves it out")
    parser.add_argument("--prefill-chunk", type=int, help="Tandem's setting, if not its default")
    args = parser.parse_args()
    gpu = harness.on_gpu()
    model = harness.prepared(args.model, args.dtype, gpu)
    prompts = load.PromptSource(model)
    flags = {"prefill_chunk": args.prefill_chunk} if args.prefill_chunk else {}
    results: dict[str, Any] = {"throughput": [], "long_prompt": [], "verdicts": []}
    with (
        harness.tandem_server(model, args.threads, **flags) as ours,
        harness.mlx_lm_server(model, harness.peer_environment(args, gpu)) as theirs,
    ):
        servers = [ours, theirs]
        for server in servers:  # warm up, at the widest batch
            widest = max(args.concurrency)
            load.closed_loop(server, make_jobs(args.prompt_tokens, [8, 16], prompts, widest), widest)
        for concurrency in args.concurrency:
            throughput(args, servers, concurrency, prompts, results)
        if args.long_prompt:
            long_prompt(args, servers, prompts, results)
    harness.write_json(args.json, args, results)


def make_jobs(lengths: Sequence[int], outputs: Sequence[int], prompts: load.PromptSource, count: int) -> list[load.BenchRequest]:
    """Requests with prompt and output lengths drawn evenly from the ranges (shortest, longest)."""
    return [load.BenchRequest(prompts.make(prompts.length(*lengths)), prompts.length(*outputs)) for _ in range(count)]


def throughput(
    args: argparse.Namespace,
    servers: Sequence[harness.Server],
    concurrency: int,
    prompts: load.PromptSource,
    results: dict[str, Any],
) -> None:
    """Tokens per second at one concurrency."""

    def play() -> list[list[load.Timed]]:
        jobs = make_jobs(args.prompt_tokens, args.max_tokens, prompts, concurrency * args.jobs_per_client)
        return [load.closed_loop(server, jobs, concurrency) for server in servers]

    rows: list[list[object]] = []
    ratios = []
    with harness.heading(f"{concurrency} clients"):
        for number, (answers, others) in enumerate(harness.rounds(args, play)):
            rates = [load.rate(one) for one in answers]
            waits = [harness.middle([a.ttft for a in one]) for one in answers]
            counts = [sum(a.tokens for a in one) for one in answers]
            ratios.append(rates[0] / rates[1])
            rows.append([number + 1, *rates, ratios[-1], *waits, *counts, others])
        harness.table(
            [
                "round",
                "tandem tok/s",
                "mlx_lm.server tok/s",
                "ratio",
                "tandem TTFT p50 s",
                "mlx_lm.server TTFT p50 s",
                "tandem tokens",
                "mlx_lm.server tokens",
                "others",
            ],
            rows,
        )
        name = f"tokens/s at {concurrency} clients, median of the rounds' ratios"
        results["verdicts"].append(harness.verdict(name, harness.middle(ratios), 1.2))
        results["throughput"].append({"concurrency": concurrency, "rounds": rows})


def long_prompt(
    args: argparse.Namespace, servers: Sequence[harness.Server], prompts: load.PromptSource, results: dict[str, Any]
) -> None:
    """Waits of all requests of rounds in which a long prompt comes while the others stream."""
    concurrency = min(args.concurrency)

    def play() -> list[list[load.Timed]]:
        jobs = make_jobs(args.prompt_tokens, args.max_tokens, prompts, concurrency * args.jobs_per_client)
        jobs.insert(concurrency + 1, load.BenchRequest(prompts.make(args.long_prompt), args.max_tokens[1], "long"))
        return [load.closed_loop(server, jobs, concurrency) for server in servers]

    with harness.heading(f"A prompt of {args.long_prompt} tokens among {concurrency - 1} streams"):
        played = harness.rounds(args, play)
        found = [[answer for answers, _ in played for answer in answers[i]] for i in range(len(servers))]
        rows = [[server.name, *_waits(answers)] for server, answers in zip(servers, found, strict=True)]
        harness.table(
            [
                "",
                "TTFT p50 s",
                "TTFT p99 s",
                "TTFT of the long prompt s",
                "longest gap in a stream s",
                "TTFT p99 of the others s",
            ],
            rows,
        )
        p99 = [percentile([a.ttft for a in answers], 0.99) for answers in found]
        name = "p99 of the time to first token, relative to mlx_lm.server's"
        results["verdicts"].append(harness.verdict(name, p99[0] / p99[1], 1.0, at_most=True))
        results["long_prompt"] = rows


def _waits(answers: Sequence[load.Timed]) -> list[float]:
    waits = [a.ttft for a in answers]
    long = [a.ttft for a in answers if a.job.name == "long"]
    others = [a.ttft for a in answers if a.job.name != "long"]
    return [
        harness.middle(waits),
        percentile(waits, 0.99),
        harness.middle(long),
        max((gap for a in answers for gap in a.gaps), default=0.0),
        percentile(others, 0.99),
    ]


if __name__ == "__main__":
    main()
