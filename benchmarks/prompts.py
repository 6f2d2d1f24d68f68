"""Short prompts that arrive at once, in shared forward passes and in one each: `prompts.py --model DIR`. No server, no scheduler.

One rank's runner is given the plans of a burst, in chunks as an engine makes them. `last` is the time until the last
prompt has its first token; `/ alone` is the same over the time of one such prompt by itself. With `--pooling` the prompts are
texts to embed, and have their vectors then.

`prompts.py --model DIR --stages 2 3 4 --tokens 1024 --chunk 128`: one prompt over so many stages and over one rank,
each rank with `--threads` threads; all are up at once and take turns.
"""

from __future__ import annotations

import argparse
from itertools import count
from pathlib import Path
from typing import Any

import harness


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--burst", type=int, nargs="+", default=[64], help="prompts that arrive at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each")
    parser.add_argument("--chunk", type=int, default=512, help="prompt tokens of a step")
    parser.add_argument("--pooling", choices=("last", "mean"), help="embed the prompts of a burst, in place of a first token")
    parser.add_argument("--stages", type=int, nargs="+", default=[], help="one prompt over so many stages, in place of bursts")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side, in turns")
    args = parser.parse_args()
    if args.stages:
        _over_stages(args)
        return
    from tandem.comm.blas import limit_threads, preload_blas

    limit_threads(preload_blas("auto"), args.threads)
    gpu = harness.on_gpu()
    model = Path(args.model) if gpu else harness.prepared(args.model, args.dtype, gpu)
    sides = {"shared passes": _runner(model, args.dtype), "one pass each": _runner(model, args.dtype, shared=False)}
    rows = []
    with harness.heading(f"Bursts of prompts of {args.tokens} tokens"):
        for burst in args.burst:
            for runner in sides.values():
                _burst(runner, burst, args)
                _burst(runner, 1, args)
            played = [
                {side: (_burst(one, burst, args), _burst(one, 1, args)) for side, one in sides.items()}
                for _ in range(args.rounds)
            ]
            for side in sides:
                last, alone = (harness.middle([one[side][i] for one in played]) for i in range(2))
                ratio = harness.middle([one["one pass each"][0] / one[side][0] for one in played])
                rows.append([burst, side, 1e3 * last, last / alone, ratio])
        harness.table(["prompts", "side", "last, ms", "/ alone", "times as fast"], rows)
    harness.write_json(args.json, args, {"rows": rows})


def _over_stages(args: argparse.Namespace) -> None:
    """Time to the first token of one prompt, over stages and over one rank. The prompts of a round are alike, its tokens too."""
    import random
    from contextlib import ExitStack

    from tandem import LLM, SamplingParams

    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    rng, params = random.Random(1), SamplingParams(max_tokens=1, temperature=0.0)
    with ExitStack() as stack:
        sides = {
            stages: stack.enter_context(
                LLM(
                    str(model),
                    dtype=args.dtype,
                    executor="cluster",
                    pipeline_parallel_size=stages,
                    threads_per_rank=args.threads,
                    prefill_chunk=args.chunk,
                    prefix_cache=0.0,
                    kv_tokens=2 * args.tokens + 64,
                    self_check=False,
                    log_level="WARNING",
                )
            )
            for stages in (1, *args.stages)
        }

        def prompt_s(llm: Any, prompt: list[int]) -> tuple[float, list[int]]:
            started = harness.now()
            [output] = llm.generate([prompt], params)
            return harness.now() - started, output.token_ids

        played = []
        for _ in range(1 + args.rounds):
            prompt = [rng.randrange(3, 200) for _ in range(args.tokens)]
            played.append({stages: prompt_s(llm, prompt) for stages, llm in sides.items()})
    times = {stages: harness.middle([one[stages][0] for one in played[1:]]) for stages in sides}
    same = {stages: sum(one[stages][1] == one[1][1] for one in played) for stages in sides}
    chunks = -(-args.tokens // args.chunk)
    rows = [
        [
            stages,
            1e3 * times[stages],
            args.tokens / times[stages],
            times[1] / times[stages],
            chunks * stages / (chunks + stages - 1),
            f"{same[stages]} of {len(played)}",
        ]
        for stages in sides
    ]
    with harness.heading(f"One prompt of {args.tokens} tokens in chunks of {args.chunk}"):
        harness.table(["stages", "first token, ms", "tok/s", "/ one rank", "these chunks allow", "same token"], rows)
    harness.write_json(args.json, args, {"rows": rows})


def _runner(model: Path, dtype: str, *, shared: bool = True) -> Any:
    from tandem.checkpoints.resolve import resolve
    from tandem.loading.stage import load_stage
    from tandem.models.description import describe
    from tandem.runner.prompt_rows import PromptRows
    from tandem.runner.runner import Runner

    files = resolve(str(model))
    description = describe(files)
    stage = load_stage(files, description, range(description.num_layers), dtype=dtype)
    runner = Runner(stage, micro_batches=1, vocab_size=stage.vocab_size, eos_token_ids=())
    if not shared:
        runner._prompt_rows = PromptRows(pooled=False)
    return runner


_STEPS = count()


def _burst(runner: Any, prompts: int, args: argparse.Namespace) -> float:
    """Seconds until all prompts have a token, or a vector. A step is built while the one before computes, as a rank does."""
    from tandem.protocol.request import SamplingParams
    from tandem.protocol.step import InsertOp, PrefillOp, StepPlan, batch_fingerprint

    greedy = SamplingParams(max_tokens=8, temperature=0.0)
    ids = [str(i) for i in range(prompts)]
    lengths: dict[str, int] = {}
    at_once = max(args.chunk // args.tokens, 1)
    started, pending = harness.now(), []
    for begin in range(0, prompts, at_once):
        new = ids[begin : begin + at_once]
        lengths |= dict.fromkeys(new, 0)
        plan = StepPlan(
            next(_STEPS),
            0,
            inserts=[InsertOp(one, [1 + int(one) % 7] * args.tokens, args.tokens, greedy) for one in new],
            prefill=[PrefillOp(one, 0, args.tokens, True, args.pooling, samples=args.pooling is None) for one in new],
            pause=begin > 0,
            sampling_seeds=dict.fromkeys(new, 1),
            fingerprint=batch_fingerprint(lengths.items()),
        )
        pending.append(runner.execute(plan))
        lengths |= dict.fromkeys(new, args.tokens)
        if len(pending) > 1:
            pending[-2].finish()
    pending[-1].finish()
    took = harness.now() - started
    runner.execute(StepPlan(next(_STEPS), 0, removes=ids, fingerprint=batch_fingerprint(()))).finish()
    return took


if __name__ == "__main__":
    main()
