"""A long shared prefix asked again: the time to the first token against that of the first asking, in each layout.

Every round has a prefix of its own, followed by a short question; then the same prefix comes with another question.
Goal: at least 8 times lower for 2,000 tokens, with two tensor-parallel ranks, two stages and two replicas alike.
"""

from __future__ import annotations

from typing import Any

import harness
import load

LAYOUTS: dict[str, dict[str, int]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "PP 2": {"pipeline_parallel_size": 2},
    "DP 2": {"data_parallel_size": 2},
}


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__, rounds=3)
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of the shared beginning")
    parser.add_argument("--question", type=int, default=16, help="tokens that follow it, different each time")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    args = parser.parse_args()
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    prompts = load.PromptSource(model)
    results: dict[str, Any] = {"verdicts": []}
    for name in args.layouts:
        rows: list[list[object]] = []
        with harness.tandem_server(model, args.threads, name, **LAYOUTS[name]) as server:

            def play(server: harness.Server = server) -> list[load.Timed]:
                prefix = prompts.make(args.prefix)
                return [load.one(server, load.BenchRequest(prefix + prompts.make(args.question), 4)) for _ in range(2)]

            play()
            with harness.heading(f"{name}: a prefix of {args.prefix} tokens asked twice"):
                for number, ((first, again), others) in enumerate(harness.rounds(args, play)):
                    rows.append([number + 1, first.ttft, again.ttft, again.cached_tokens, first.ttft / again.ttft, others])
                harness.table(["round", "first TTFT s", "again TTFT s", "cached tokens", "ratio", "others"], rows)
        results[name] = rows
        results["verdicts"].append(
            harness.verdict(f"{name}, median of the rounds' ratios", harness.middle([float(str(row[4])) for row in rows]), 8)
        )
    harness.write_json(args.json, args, results)


if __name__ == "__main__":
    main()
