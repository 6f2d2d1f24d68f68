"""Most memory that each rank has used against the bytes of its own weights, in several layouts.

A rank loads its slice alone, so its peak should be the slice plus what Python and MLX need: goal, at most 1.15 times
the slice plus 150 MB for a model of 1 GB or more. On a GPU the peak is MLX's own count of device memory, on a CPU the
process's resident set.
"""

from __future__ import annotations

from typing import Any

import harness
import load

MB = 1e6


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__)
    parser.add_argument(
        "--layouts", nargs="+", default=["1,1", "1,1,1", "2"], help="ranks of each stage, as --parallel takes them"
    )
    parser.add_argument("--share", type=float, default=1.15, help="allowed multiple of the slice")
    parser.add_argument("--extra", type=float, default=150.0, help="allowed beyond it, in MB")
    parser.add_argument("--clients", type=int, default=2, help="short requests at once, to see the peak of serving")
    parser.add_argument("--as-stored", action="store_true", help="the model itself, not an unquantised copy")
    args = parser.parse_args()
    gpu = harness.on_gpu()
    model = (
        harness.prepared(args.model, "auto" if gpu else "stored", gpu=True)
        if args.as_stored
        else (harness.prepared(args.model, args.dtype, gpu))
    )
    prompts = load.PromptSource(model)
    rows: list[list[object]] = []
    worst = 0.0
    with harness.heading(f"Memory of each rank: {model.name}"):
        for layout in args.layouts:
            flags: dict[str, Any] = {"parallel": layout, "executor": "cluster", "dequantize": "auto"}
            with harness.tandem_server(model, args.threads, **flags) as server:
                loaded = server.get("/health")["ranks"]
                load.closed_loop(server, [load.BenchRequest(prompts.make(100), 16)] * args.clients, args.clients)
                for before, rank in zip(loaded, server.get("/health")["ranks"], strict=True):
                    limit = args.share * rank["weight_bytes"] + args.extra * MB
                    worst = max(worst, rank["peak_bytes"] / limit)
                    layers = f"{rank['layers'][0]}-{rank['layers'][1] - 1}"
                    rows.append(
                        [
                            layout,
                            rank["rank"],
                            layers,
                            rank["weight_bytes"] / MB,
                            before["peak_bytes"] / MB,
                            rank["peak_bytes"] / MB,
                            limit / MB,
                            rank["peak_bytes"] / limit,
                        ]
                    )
        harness.table(
            ["layout", "rank", "layers", "slice MB", "peak loaded MB", "peak served MB", "limit MB", "peak / limit"], rows
        )
        verdicts = [harness.verdict(f"largest peak / ({args.share:g} slice + {args.extra:g} MB)", worst, 1.0, at_most=True)]
    harness.write_json(args.json, args, {"ranks": rows, "verdicts": verdicts})


if __name__ == "__main__":
    main()
