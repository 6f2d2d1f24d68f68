"""Where a tensor-parallel decode step spends its time, and what remedies bring: `tensor_parallel.py --model DIR`.

Each variant runs in fresh rank processes over NCCL (or ring) and decodes with steps dispatched ahead, as a rank does.
"no sums" leaves the all-reduces out (its tokens are wrong): the difference to "as served" is what they cost. The other
variants are remedies, one at a time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness

from tandem.launchers.process_groups import make_process_group

VARIANTS: dict[str, dict[str, str]] = {
    "one rank": {},
    "as served": {},
    "no sums": {},
    "whole head on each rank": {},
    "fused projections": {},
    "one rank, fused projections": {},
    "NCCL protocol LL": {"NCCL_PROTO": "LL"},
    "NCCL one channel": {"NCCL_MAX_NCHANNELS": "1"},
    "longer CUDA graphs": {"MLX_MAX_OPS_PER_BUFFER": "400", "MLX_MAX_MB_PER_BUFFER": "4000"},
}


def main() -> None:
    """Command line, and the entry of a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="nccl", choices=("nccl", "ring"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--as-rank", metavar="VARIANT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_rank:
        print(json.dumps(run_rank(args, args.as_rank)), flush=True)
        return
    rows = [[variant, *run_variant(args, variant)] for variant in args.variants]
    harness.table(["variant", *(f"batch {n}: ms a step" for n in args.batches), "ms to build a step"], rows)
    harness.write_json(args.json, args, {"rows": rows})


def run_variant(args: argparse.Namespace, variant: str) -> Sequence[float]:
    """Milliseconds a step of each batch size, and to build one, of the slowest rank."""
    size = 1 if variant.startswith("one rank") else args.ranks
    process_group = make_process_group(args.backend, size, 0)
    command = [
        sys.executable,
        __file__,
        "--model",
        args.model,
        "--ranks",
        str(size),
        "--backend",
        args.backend,
        "--steps",
        str(args.steps),
        "--batches",
        *map(str, args.batches),
        "--as-rank",
        variant,
    ]
    ranks = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            text=True,
            env=harness.child_environment({**process_group.variables(i), **VARIANTS[variant], **harness.threads_environment(1)}),
        )
        for i in range(size)
    ]
    try:
        figures = [json.loads(rank.communicate(timeout=120)[0].splitlines()[-1]) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
        process_group.remove()
    return [max(column) for column in zip(*figures, strict=True)]


def run_rank(args: argparse.Namespace, variant: str) -> list[float]:
    """Load this rank's part and time its steps."""
    from tandem.comm.blas import preload_blas

    preload_blas("auto")
    import mlx.core as mx

    from tandem.checkpoints.resolve import resolve
    from tandem.comm.group import StageGroup
    from tandem.loading.stage import load_stage
    from tandem.models.description import describe
    from tandem.models.shard import plan_shards

    group = StageGroup(args.backend, args.ranks) if args.ranks > 1 else None
    files = resolve(args.model)
    description = describe(files)
    shards = plan_shards(description, args.ranks)
    if variant == "whole head on each rank":
        shards = tuple(replace(one, vocab=range(description.vocab_size), vocab_sizes=()) for one in shards)
    rank = group.rank if group else 0
    parallel: Any = NoSums(group) if variant == "no sums" else group
    stage = load_stage(
        files,
        description,
        range(description.num_layers),
        shard=shards[rank] if group else None,
        tensor_parallel=parallel,
        fuse="fused" in variant,
    )
    times = [time_steps(stage, batch, args.steps) for batch in args.batches]
    mx.synchronize()
    return [*(step for step, _ in times), times[0][1]]


class NoSums:
    """Leaves every rank with its own part of a sum."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def sum(self, x: Any) -> Any:
        """Just `x`."""
        return x

    def gather_last(self, x: Any, sizes: Sequence[int]) -> Any:
        """As the group does it."""
        return self._group.gather_last(x, sizes)


def time_steps(stage: Any, batch: int, steps: int) -> tuple[float, float]:
    """Milliseconds a step, and to build its graph, with rows of 64 tokens."""
    import mlx.core as mx

    from tandem.runner.kv_store import KVStore

    store = KVStore(stage.make_caches)
    for row in range(batch):
        caches = stage.make_caches()
        mx.eval(stage.forward(mx.array([[1] * 64]), caches))
        store.join(str(row), caches)
    tokens = mx.zeros((batch,), mx.int32)
    started = built = 0.0
    for step in range(steps + 10):
        if step == 10:
            started, built = time.perf_counter(), 0.0
        began = time.perf_counter()
        hidden = stage.forward(tokens[:, None], store.batch())
        following = mx.argmax(stage.head(hidden)[:, -1], axis=-1).astype(mx.int32)
        built += time.perf_counter() - began
        mx.async_eval(following)
        tokens.tolist()
        tokens = following
    tokens.tolist()
    return (time.perf_counter() - started) / steps * 1e3, built / steps * 1e3


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
