"""Most memory that each rank has used against the bytes of its own weights, for pipelines of several lengths.

A rank loads its slice alone, so its peak should be the slice plus what Python and MLX need: goal, at most 1.2 times the
slice plus 200 MB. On a GPU the peak is MLX's own count of device memory, on a CPU the process's resident set.
"""

from __future__ import annotations

from typing import Any

import harness
import load

MB = 1e6


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3], help="lengths of the pipeline")
    parser.add_argument("--clients", type=int, default=2, help="short requests at once, to see the peak of serving")
    parser.add_argument("--as-stored", action="store_true", help="the model itself, not an unquantised copy")
    args = parser.parse_args()
    gpu = harness.on_gpu()
    model = harness.prepared(args.model, "auto" if gpu else "stored", gpu=True) if args.as_stored else (
        harness.prepared(args.model, args.dtype, gpu))
    prompts = load.Prompts(model)
    rows: list[list[object]] = []
    worst = 0.0
    with harness.heading(f"Memory of each rank: {model.name}"):
        for stages in args.stages:
            flags: dict[str, Any] = {"pipeline_parallel_size": stages, "executor": "cluster", "dequantize": "auto"}
            with harness.tandem_server(model, args.threads, **flags) as server:
                loaded = server.get("/health")["ranks"]
                load.closed_loop(server, [load.Job(prompts.make(100), 16)] * args.clients, args.clients)
                for before, rank in zip(loaded, server.get("/health")["ranks"], strict=True):
                    limit = 1.2 * rank["weight_bytes"] + 200 * MB
                    worst = max(worst, rank["peak_bytes"] / limit)
                    layers = f"{rank['layers'][0]}-{rank['layers'][1] - 1}"
                    rows.append([stages, rank["rank"], layers, rank["weight_bytes"] / MB, before["peak_bytes"] / MB,
                                 rank["peak_bytes"] / MB, limit / MB, rank["peak_bytes"] / limit])
        harness.table(["stages", "rank", "layers", "slice MB", "peak loaded MB", "peak served MB", "limit MB",
                       "peak / limit"], rows)
        verdicts = [harness.verdict("largest peak / (1.2 slice + 200 MB)", worst, 1.0, at_most=True)]
    harness.write_json(args.json, args, {"ranks": rows, "verdicts": verdicts})


if __name__ == "__main__":
    main()
