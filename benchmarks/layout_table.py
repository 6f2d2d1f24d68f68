"""Layouts side by side: one stream's decoding, a prompt's speed, and the throughput of many clients.

All layouts serve at once and are measured in turns; figures are medians of the rounds, and ratios are to the first
layout. A layout is the ranks of each stage as `--parallel` takes them, with `xN` behind it for N replicas: `1`, `2`,
`1,1`, `2,2`, `1x4`. Made for GPUs, where idle ranks cost the others nothing and every layout fits beside the others.
"""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import harness
import load
from against_mlx_lm_server import make_jobs


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--layouts", nargs="+", default=["1", "2", "1,1", "1x2"])
    parser.add_argument("--backend", default="nccl", choices=("ring", "nccl"), help="between the ranks of a stage")
    parser.add_argument("--prompt", type=int, default=2048, help="tokens of the prompt whose speed is measured")
    parser.add_argument("--output", type=int, default=128, help="tokens of the one stream's answer")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 32], help="clients for throughput")
    parser.add_argument(
        "--mix",
        type=int,
        nargs=4,
        metavar=("FROM", "TO", "FROM", "TO"),
        default=[128, 512, 64, 128],
        help="tokens of prompts and of outputs for throughput, drawn evenly",
    )
    parser.add_argument("--kv-tokens", type=int, default=65536, help="size of each layout's KV cache")
    args = parser.parse_args()
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    prompts = load.PromptSource(model)
    with ExitStack() as stack:
        servers = [stack.enter_context(server_of(layout, args, model)) for layout in args.layouts]
        columns = ["decode tok/s", "prompt tok/s", *(f"{count} clients tok/s" for count in args.clients)]

        def play() -> list[list[float]]:
            return [figures(server, args, prompts) for server in servers]

        play()
        with harness.heading(f"{model.name}: layouts side by side"):
            played = [measured for measured, _ in harness.rounds(args, play)]
            middles = [[harness.middle([one[i][j] for one in played]) for j in range(len(columns))] for i in range(len(servers))]
            rows: list[list[object]] = [
                [server.name, *(cell for j, value in enumerate(mine) for cell in (value, value / middles[0][j]))]
                for server, mine in zip(servers, middles, strict=True)
            ]
            harness.table(["layout", *(name for column in columns for name in (column, "ratio"))], rows)
    results: dict[str, Any] = {"rows": rows}
    harness.write_json(args.json, args, results)


def server_of(layout: str, args: argparse.Namespace, model: Path) -> harness.Server:
    """`tandem serve` in one layout."""
    parallel, _, replicas = layout.partition("x")
    return harness.tandem_server(
        model,
        args.threads,
        layout,
        parallel=parallel,
        data_parallel_size=replicas or "1",
        backend=args.backend,
        executor="cluster",
        prefix_cache=0,
        kv_tokens=args.kv_tokens,
        max_batch_size=max(args.clients),
    )


def figures(server: harness.Server, args: argparse.Namespace, prompts: load.PromptSource) -> list[float]:
    """One round of one layout, in tokens per second."""
    decode = load.one(server, load.BenchRequest(prompts.make(8), args.output)).decode_rate
    prompt = args.prompt / load.one(server, load.BenchRequest(prompts.make(args.prompt), 1)).ttft
    rates = [
        load.rate(load.closed_loop(server, make_jobs(args.mix[:2], args.mix[2:], prompts, 2 * count), count))
        for count in args.clients
    ]
    return [decode, prompt, *rates]


if __name__ == "__main__":
    main()
