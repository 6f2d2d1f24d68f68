"""A decode step of one rank against mlx-lm's bare model: `step.py --model DIR`. No server, no scheduler.

All sides have the same weights in the same process and are played in turns. Each decodes rows of equal length greedily,
and builds a step while the one before computes, as a rank does. `build` is our own Python or mlx-lm's, `dispatch` is
time inside mx.async_eval (on a GPU that builds and launches kernels, and waits when the device is far behind), `step`
is the whole from one token to the next; all in milliseconds. `operations` are the nodes of the graph of one step.

With `--drafts 3` steps that verify three drafts (and keep the states of four positions) are compared with steps of one
token; each waits for the one before. `random_model.py hybrid-1b DIR` makes a model for it (goal: at most 1.4).
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness

SIDES = {"mlx-lm": "", "separate": "off", "fused": "all", "fused in attention": "self_attn", "fused in mlp": "mlp"}
"""What of each layer has its projections fused."""
WARM_UP = 8
GOAL = 1.4
"""Most that a step with drafts may take, in steps without."""


class Times(NamedTuple):
    """Milliseconds of one step, means over a round."""

    step: float
    build: float
    dispatch: float


class Watch:
    """Time spent in mx.async_eval, and the operations that it is given."""

    def __init__(self, mx: Any) -> None:
        self._mx, self._real = mx, mx.async_eval
        self.seconds, self.counting, self.operations = 0.0, False, 0

    def __enter__(self) -> Watch:
        self._mx.async_eval = self._async_eval
        return self

    def __exit__(self, *exc: object) -> None:
        self._mx.async_eval = self._real

    def _async_eval(self, *arrays: Any) -> None:
        if self.counting:
            with tempfile.NamedTemporaryFile("r", suffix=".dot") as file:
                self._mx.export_to_dot(file.name, *[one for one in _flat(arrays) if isinstance(one, self._mx.array)])
                self.operations += file.read().count("shape=rectangle")
        began = time.perf_counter()
        self._real(*arrays)
        self.seconds += time.perf_counter() - began


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        for one in value:
            yield from _flat(one)
    else:
        yield value


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64], help="sequences that decode together")
    parser.add_argument("--context", type=int, default=256, help="tokens of each before the first step")
    parser.add_argument(
        "--spread",
        type=int,
        default=0,
        help="tokens by which each of our rows is longer than the one before; mlx-lm's stay alike",
    )
    parser.add_argument("--longest", type=int, default=0, help="tokens of the first of our rows, in place of --context")
    parser.add_argument("--steps", type=int, default=50, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side, in turns")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--drafts", type=int, default=0, help="drafts of each row in steps that are compared with those without")
    args = parser.parse_args()
    args.sides = ["separate"] if args.drafts else args.sides
    from tandem.comm.blas import limit_threads, preload_blas

    limit_threads(preload_blas("auto"), args.threads)
    gpu = harness.on_gpu()
    if not gpu:  # where quantised products are slow
        args.model = str(harness.prepared(args.model, args.dtype, gpu))
    with harness.heading("A decode step"):
        loaded = {side: _load(side, args) for side in args.sides}
        rows = [row for count in args.rows for row in _compare(loaded, count, args)]
        harness.table(["rows", "side", "step", "build", "dispatch", "operations", "step / first"], rows)
    ratios = {f"{rows} rows, {side} / one token, median": ratio for rows, side, *_, ratio in rows if args.drafts and ratio != 1}
    verdicts = [harness.verdict(name, float(str(ratio)), GOAL, at_most=True) for name, ratio in ratios.items()]
    harness.write_json(args.json, args, {"rows": rows, "verdicts": verdicts})


def _load(side: str, args: argparse.Namespace) -> Any:
    import mlx.core as mx

    from tandem.checkpoints.resolve import resolve
    from tandem.loading.fusion import fuse_projections
    from tandem.loading.stage import load_stage
    from tandem.models.description import describe

    files = resolve(args.model)
    description = describe(files)
    if side == "mlx-lm":
        from mlx_lm.utils import load_model

        model, _ = load_model(Path(files.path))
        if args.dtype != "auto":
            model.set_dtype(getattr(mx, args.dtype))
        mx.eval(model.parameters())
        return model
    stage = load_stage(files, description, range(description.num_layers), dtype=args.dtype, fuse=SIDES[side] == "all")
    if SIDES[side] not in ("all", "off"):
        parts = {i: getattr(stage.modules[i], SIDES[side]) for i in range(description.num_layers)}
        fuse_projections(parts, stage.trace)
    return stage


def _compare(loaded: dict[str, Any], count: int, args: argparse.Namespace) -> list[list[object]]:
    """A row of the table for each side."""
    import mlx.core as mx

    with Watch(mx) as watch:
        sides = {
            name: (_bare(one, count, args.context) if name == "mlx-lm" else _ours(one, count, args))
            for name, one in loaded.items()
        }
        if wide := args.drafts and args.drafts + 1:
            kinds = {"one token": (1, 1), f"{wide} tokens, all kept": (wide, wide), f"{wide} tokens, one kept": (wide, 1)}
            sides = {name: _ours(loaded["separate"], count, args, *kind) for name, kind in kinds.items()}
        for step in sides.values():
            _round(step, WARM_UP, watch, ahead=not wide)
        operations = {name: _operations(step, watch) for name, step in sides.items()}
        played = [
            {name: _round(step, args.steps, watch, ahead=not wide) for name, step in sides.items()} for _ in range(args.rounds)
        ]
    found = []
    for name in sides:
        middle = [statistics.median(one[name][i] for one in played) for i in range(3)]
        ratio = statistics.median(one[name].step / next(iter(one.values())).step for one in played)
        found.append([count, name, *middle, operations[name], ratio])
    return found


Step = Callable[[], Callable[[], object]]
"""Builds and dispatches a step; what it returns waits for the step's tokens."""


def _operations(step: Step, watch: Watch) -> int:
    watch.operations, watch.counting = 0, True
    step()()
    watch.counting = False
    return watch.operations


def _round(step: Step, steps: int, watch: Watch, *, ahead: bool) -> Times:
    """Play `steps` steps; with `ahead` each is built before the end of the one before."""
    wait, built, watch.seconds = step(), 0.0, 0.0
    started, before = time.perf_counter(), watch.seconds
    for _ in range(steps):
        if not ahead:
            wait()
        began = time.perf_counter()
        following = step()
        built += time.perf_counter() - began
        if ahead:
            wait()
        wait = following
    whole, dispatched = time.perf_counter() - started, watch.seconds - before
    wait()
    return Times(*(1e3 * seconds / steps for seconds in (whole, built - dispatched, dispatched)))


def _bare(model: Any, count: int, context: int) -> Step:
    """mlx-lm's model with its own caches."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    caches = make_prompt_cache(model)
    tokens = mx.argmax(model(mx.ones((count, context), mx.int32), cache=caches)[:, -1], axis=-1)
    mx.eval(tokens)

    def step() -> Callable[[], object]:
        nonlocal tokens
        tokens = mx.argmax(model(tokens[:, None], cache=caches)[:, -1], axis=-1)
        mx.async_eval(tokens)
        return tokens.tolist

    return step


def _ours(stage: Any, count: int, args: argparse.Namespace, width: int = 1, kept: int = 1) -> Step:
    """A rank's runner, which is given plans as an engine makes them: steps of `width` tokens a row, of which `kept` count."""
    from tandem.protocol.request import SamplingParams
    from tandem.protocol.step import InsertOp, PrefillOp, SpecDecodePlan, SpecDecodeRow, StepPlan, batch_fingerprint
    from tandem.runner.ragged_attention import chosen_attention
    from tandem.runner.runner import Runner

    options = {"vocab_size": stage.vocab_size, "eos_token_ids": (), "attention": chosen_attention(), "drafts": args.drafts}
    runner = Runner(stage, micro_batches=1, **options)
    lengths: dict[str, int] = {}
    number = 0

    def execute(**what: Any) -> Any:
        nonlocal number
        number += 1
        return runner.execute(StepPlan(number, 0, fingerprint=batch_fingerprint(lengths.items()), **what))

    greedy = SamplingParams(max_tokens=1 << 30, temperature=0.0)
    for row in range(count):
        one, waiting, length = str(row), bool(lengths), args.context + row * args.spread
        length = length if row else args.longest or length
        lengths[one] = 0
        execute(
            inserts=[InsertOp(one, [1] * length, length, greedy)],
            decode=[],
            pause=waiting,
            prefill=[PrefillOp(one, 0, length, last=True)],
            sampling_seeds={one: row},
        ).finish()
        lengths[one] = length

    def step() -> Callable[[], object]:
        rows = [SpecDecodeRow(one, length, [1] * width) for one, length in lengths.items()] if args.drafts else []
        pending = execute(decode=list(lengths), spec_decode_plan=SpecDecodePlan(rows) if rows else None)
        for one in lengths:
            lengths[one] += kept
        return pending.finish

    return step


if __name__ == "__main__":
    main()
