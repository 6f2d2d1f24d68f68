"""Short prompts that arrive at once, in shared forward passes and in one each: `prompts.py --model DIR`. No server, no scheduler.

One rank's runner is given the plans of a burst, in chunks as an engine makes them. `last` is the time until the last
prompt has its first token; `/ alone` is the same over the time of one such prompt by itself. With `--pooling` the prompts are
texts to embed, and have their vectors then.

`prompts.py --model DIR --stages 2 3 4 --tokens 1024 --chunk 128`: one prompt over so many stages and over one rank,
each rank with `--threads` threads; all are up at once and take turns. Without `--chunk` chunks are the server's default.
`--against REV` plays an older commit (or a directory with its `src`) beside this working tree, `--streams 4` beside running
streams, whose p99 gap is shown with what is promised. The second table says how long each stage computed the prompt, and
when it waited.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import harness
import psutil


def main() -> None:
    """Command line."""
    parser = harness.arguments(__doc__)
    parser.add_argument("--burst", type=int, nargs="+", default=[64], help="prompts that arrive at once")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each")
    parser.add_argument("--chunk", type=int, help="prompt tokens of a step; 512 for bursts")
    parser.add_argument("--pooling", choices=("last", "mean"), help="embed the prompts of a burst, in place of a first token")
    parser.add_argument("--stages", type=int, nargs="+", default=[], help="one prompt over so many stages, in place of bursts")
    parser.add_argument("--streams", type=int, default=0, help="with --stages: running streams beside the prompt")
    parser.add_argument(
        "--against", help="with --stages: an older commit, or a directory with its src, that is measured beside this working tree"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each side, in turns")
    parser.add_argument("--play", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        _play(args)
        return
    if args.stages:
        _over_stages(args)
        return
    args.chunk = args.chunk or 512
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
    from contextlib import ExitStack

    with ExitStack() as stack, harness.heading(f"One prompt of {args.tokens} tokens in chunks of {args.chunk or 'the default'}"):
        trees = stack.enter_context(harness.sources(args.against))
        harness.prepared(args.model, args.dtype, harness.on_gpu())
        players = {}
        for name, tree in trees.items():
            env = harness.child_environment(harness.source_path(tree))
            command = [sys.executable, __file__, *sys.argv[1:], "--play"]
            player = subprocess.Popen(command, env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            players[name] = stack.enter_context(player)
        numbers = (1, *args.stages)
        played: list[dict[tuple[str, int], Any]] = []
        for number in range(1 + args.rounds):
            played.append(
                {(name, stages): _ask(player, stages, number) for stages in numbers for name, player in players.items()}
            )
        rows, stage_rows = [], []
        for name, stages in played[0]:
            found = [one[name, stages] for one in played[1:]]
            alone = [one[name, 1] for one in played[1:]]
            first_s = harness.middle([one["first_s"] for one in found])
            ratio = harness.middle([a["first_s"] / one["first_s"] for a, one in zip(alone, found, strict=True)])
            same = sum(one[name, stages]["token"] == one[name, 1]["token"] for one in played)
            chunks = [harness.middle(times) for times in zip(*(one["chunks"][0] for one in alone), strict=False)]
            total, count = sum(chunks), len(chunks)
            allowed = [stages * count / (count + stages - 1), stages * total / (total + (stages - 1) * max(chunks))]
            gaps = [harness.middle([one[key] for one in found]) for key in ("gap_ms", "promised_ms") if args.streams]
            rows.append([name, stages, 1e3 * first_s, args.tokens / first_s, ratio, *allowed, *gaps, f"{same} of {len(played)}"])
            slots = int(harness.middle([len(one["chunks"][0]) for one in found]))
            for stage in range(stages):
                busy = 1e3 * harness.middle([sum(one["chunks"][stage]) for one in found])
                begins, ends, used = (
                    1e3 * harness.middle([one[key][stage] for one in found]) for key in ("begins", "ends", "used")
                )
                first, *_, last = (1e3 * took for took in found[-1]["chunks"][stage])
                cells = [
                    begins,
                    busy,
                    ends - begins - busy,
                    1e3 * first_s - ends,
                    used,
                    busy / (1e3 * total / stages),
                    first,
                    last,
                ]
                stage_rows.append([name, f"{stage + 1} of {stages}", slots, *cells])
        gap_columns = ["p99 gap, ms", "promised"] if args.streams else []
        allow = ["alike chunks allow", "chunks as one rank's allow"]
        harness.table(["source", "stages", "first token, ms", "tok/s", "/ one rank", *allow, *gap_columns, "same token"], rows)
        print()
        waits = [
            "before, ms",
            "computes",
            "waits between",
            "after",
            "processor",
            "computes / its part of one rank",
            "first chunk",
            "last",
        ]
        harness.table(["source", "stage", "chunks", *waits], stage_rows)
    harness.write_json(args.json, args, {"rows": rows, "stages": stage_rows})


def _ask(player: subprocess.Popen[str], stages: int, number: int) -> Any:
    """Have a process play a round over `stages`, with prompt `number`."""
    assert player.stdin is not None and player.stdout is not None
    print(json.dumps([stages, number]), file=player.stdin, flush=True)
    return json.loads(player.stdout.readline())


def _play(args: argparse.Namespace) -> None:
    """Play the rounds that standard input asks for."""
    from contextlib import ExitStack

    from tandem import LLM

    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    options: dict[str, Any] = {"prefill_chunk": args.chunk} if args.chunk else {}
    with ExitStack() as stack:
        sides = {}
        for stages in (1, *args.stages):
            llm = LLM(
                str(model),
                dtype=args.dtype,
                executor="cluster",
                pipeline_parallel_size=stages,
                threads_per_rank=args.threads,
                prefix_cache=0.0,
                # Rows of a batch take as much as the longest.
                kv_tokens=2 * args.tokens + 4096 + args.streams * (args.tokens + 2500),
                self_check=False,
                log_level="WARNING",
                **options,
            )
            sides[stages] = stack.enter_context(llm), _Recorder(llm)
        for line in sys.stdin:
            stages, number = json.loads(line)
            print(json.dumps(_round(*sides[stages], args, number)), flush=True)


class _Recorder:
    """What an engine has sent to its ranks, and when each has reported it."""

    def __init__(self, llm: Any) -> None:
        self.plans: dict[int, Any] = {}
        self.sent: dict[int, float] = {}
        self.reports: dict[int, dict[int, float]] = {}
        """Times by step and rank."""
        executor = llm.engine.executor
        self._submit, self._collect = executor.submit, executor.collect
        executor.submit, executor.collect = self.submit, self.collect

    def submit(self, plan: Any) -> None:
        self.plans[plan.step_id], self.sent[plan.step_id] = plan, harness.now()
        self._submit(plan)

    def collect(self, timeout_s: float) -> Any:
        reports, at = self._collect(timeout_s), harness.now()
        for report in reports:
            if step := getattr(report, "step", None):
                self.reports.setdefault(step.step_id, {})[step.rank] = at
        return reports


def _processor_s(llm: Any) -> list[float]:
    """Return the processor seconds of each rank, in rank order."""
    times = [psutil.Process(pid).cpu_times() for pid in llm.engine.executor.pids]
    return [one.user + one.system for one in times]


def _round(llm: Any, recorder: _Recorder, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Compute one prompt, beside `args.streams` streams if there are any."""
    import random
    import threading

    from tandem import SamplingParams

    rng, over = random.Random(number), threading.Event()

    def stream(seed: int) -> None:
        text = " ".join(str(seed + i) for i in range(8))
        for _ in llm.stream(text, SamplingParams(max_tokens=2000, temperature=1.0, seed=seed, ignore_eos=True)):
            if over.is_set():
                return

    threads = [threading.Thread(target=stream, args=(i,)) for i in range(args.streams)]
    recorder.plans.clear()
    recorder.reports.clear()
    for thread in threads:
        thread.start()
    while threads and sum(bool(plan.decode) for plan in list(recorder.plans.values())) < 60:
        time.sleep(0.01)
    prompt = [rng.randrange(3, 200) for _ in range(args.tokens if number else args.tokens // 4)]  # round 0 warms up
    used, started = _processor_s(llm), harness.now()
    [output] = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0))
    first_s = harness.now() - started
    used = [after - before for before, after in zip(used, _processor_s(llm), strict=True)]
    pace = llm.engine.scheduler.prompts
    promised_s = (pace.limit_s or 0.0) + (pace._decode_s or 0.0)
    over.set()
    for thread in threads:
        thread.join()
    while not llm.engine.idle:
        time.sleep(0.01)
    plans = [plan for step, plan in sorted(recorder.plans.items()) if recorder.sent[step] >= started]
    chunks: list[list[float]] = []
    begins, ends = [], []
    before: dict[int, float] = {}
    """Time of each step on the stage before."""
    steps = [plan.step_id for plan in plans if plan.prefill]
    for rank in range(len(llm.engine.layout.ranks)):
        at, own = 0.0, []
        for plan in plans:
            step, ended = plan.step_id, recorder.reports[plan.step_id][rank]
            began = max(at, recorder.sent[step], before.get(step, 0.0))
            at = before[step] = max(ended, began)
            if plan.prefill:
                own.append(at - began)
                if step == steps[0]:
                    begins.append(began - started)
                if step == steps[-1]:
                    ends.append(at - started)
        chunks.append(own)
    gaps: list[float] = []
    last: dict[str, float] = {}
    for step, plan in sorted(recorder.plans.items()):
        at = max(recorder.reports[step].values())
        for one in plan.decode:
            if started <= at <= started + first_s and one in last:
                gaps.append(at - last[one])
            last[one] = at
    gap_s = sorted(gaps)[int(0.99 * (len(gaps) - 1))] if gaps else 0.0
    found = {"first_s": first_s, "token": output.token_ids, "chunks": chunks, "begins": begins, "ends": ends, "used": used}
    return found | {"gap_ms": 1e3 * gap_s, "promised_ms": 1e3 * promised_s}


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
