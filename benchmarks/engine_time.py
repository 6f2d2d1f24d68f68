"""The engine's own work, against an older commit in turns: `engine_time.py --against REV`. No model is computed.

Ranks answer at once with one token a row. Times are processor time of the engine's thread: of a step with 32 and 256
rows, of a step's metrics alone, the longest that one prompt of 128k tokens holds the loop, and what a plan costs that goes
to eight ranks. "waits" is the share of steps that wait for the device before they are built, as a row has left, in a batch
that is refilled.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
ROWS = (32, 256)
LONG = 131_072
GOALS = {"step of 256 rows, ms": 0.8, "waits of 32 rows, %": 2.0, "waits of 256 rows, %": 2.0}


def main() -> None:
    """Play both sides in turns, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--against", default="HEAD~1", help="older commit that is measured beside this working tree")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each side, in turns")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure()))
        return
    from harness import middle, source_path, sources, table, verdict  # of this working tree, unlike what is measured

    from tandem.env import child_environment

    with sources(args.against) as trees:
        sides: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
        for _ in range(args.rounds):
            for name, found in sides.items():
                env = child_environment(source_path(trees[name]))
                ran = subprocess.run([sys.executable, __file__, "--measure"], check=True, capture_output=True, env=env)
                found.append(json.loads(ran.stdout.splitlines()[-1]))
    before, after = sides.values()
    rows = []
    for name in after[0]:
        was, is_now = (middle([found[name] for found in side]) for side in (before, after))
        rows.append([name, was, is_now, middle([b[name] / max(a[name], 1e-9) for b, a in zip(before, after, strict=True)])])
    table(["", args.against, "now", "times less"], rows)
    for name, goal in GOALS.items():
        verdict(name, middle([found[name] for found in after]), goal, at_most=True)


def measure() -> dict[str, float]:
    """All figures of the code that is imported."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for rows in ROWS:
            found |= steps(directory, rows)
        found["prompt of 128k, longest hold, ms"], found["prompt of 128k, all, ms"] = long_prompt(directory)
    found["plan to 8 ranks, ms"] = broadcast()
    for rows in ROWS:
        found[f"waits of {rows} rows, %"] = waits(rows)
    return found


def engine_of(directory: str, rows: int) -> tuple[Any, Any]:
    """Engine whose one rank answers at once, and that rank, which counts what it takes itself."""
    from tandem.config.loading import build
    from tandem.engine.build_layout import plan_layout
    from tandem.engine.engine import Engine
    from tandem.executors.executor import Executor
    from tandem.protocol.control import Ready, Stepped
    from tandem.protocol.step import RankStep, StepPlan, StepResult
    from tandem.testing import tiny_model

    class Prompt(Executor):
        def __init__(self) -> None:
            self.plans: list[StepPlan] = []
            self.seconds, self.steps = 0.0, 0

        def start(self, progress: object = None) -> list[Ready]:
            return [Ready(0, 10**6, 64, 2**34, 0, False, "host", 1, True)]

        def submit(self, plan: StepPlan) -> None:
            self.plans.append(plan)

        def collect(self, timeout_s: float) -> list[Stepped]:
            began = time.thread_time()
            plans, self.plans = self.plans, []
            self.steps += len(plans)
            reports = [
                Stepped(
                    RankStep(0, one.step_id, 0.001, 0), result=StepResult(one.step_id, one.micro_batch, [5] * len(one.sampled()))
                )
                for one in plans
            ]
            self.seconds += time.thread_time() - began
            return reports

        def close(self) -> None:
            pass

    rank = Prompt()
    model = tiny_model(directory, layers=1, config={"max_position_embeddings": 2 * LONG})
    settings = build({"model": str(model), "max_batch_size": rows, "kv_tokens": 2 * LONG, "self_check": False})
    engine = Engine(settings, plan_layout(settings), rank)
    engine.start()
    return engine, rank


def steps(directory: str, rows: int) -> dict[str, float]:
    """Milliseconds of a decode step, without what the rank takes, and of its metrics."""
    from tandem.protocol.request import EngineRequest, SamplingParams

    engine, rank = engine_of(directory, rows)
    params = SamplingParams(max_tokens=300, ignore_eos=True)
    for i in range(rows):
        engine.submit(EngineRequest(request_id=f"chatcmpl-{i:032x}", prompt=[5] * 20, params=params))
    for _ in range(60):
        engine.pump(0.0)
    seconds = 0.0
    real = engine.take_messages

    def take_messages() -> Any:
        nonlocal seconds
        began = time.thread_time()
        messages = real()
        seconds += time.thread_time() - began
        return messages

    engine.take_messages = take_messages
    steps, own, began = rank.steps, rank.seconds, time.thread_time()
    for _ in range(100):
        engine.pump(0.0)
    took, count = time.thread_time() - began - (rank.seconds - own), rank.steps - steps
    return {f"step of {rows} rows, ms": 1e3 * took / count, f"metrics of {rows} rows, ms": 1e3 * seconds / count}


def long_prompt(directory: str) -> tuple[float, float]:
    """Milliseconds of the longest hold of the loop until a long prompt has its first token, and of all of it."""
    from tandem.protocol.request import EngineRequest, SamplingParams

    engine, rank = engine_of(directory, 8)
    rng, holds = random.Random(0), []

    def held(work: Callable[[], Any]) -> None:
        began, own = time.thread_time(), rank.seconds
        work()
        holds.append(time.thread_time() - began - (rank.seconds - own))

    prompt = [rng.randrange(500) for _ in range(LONG)]
    held(
        lambda: engine.submit(EngineRequest(request_id="r", prompt=prompt, params=SamplingParams(max_tokens=2, ignore_eos=True)))
    )
    while not engine.idle:
        held(lambda: engine.pump(0.0))
    return 1e3 * max(holds), 1e3 * sum(holds)


def broadcast() -> float:
    """Milliseconds for a plan of a long prompt to eight ranks, without the socket."""
    from tandem.executors.cluster import ClusterExecutor
    from tandem.protocol.codec import encode
    from tandem.protocol.control import Plan
    from tandem.protocol.request import SamplingParams
    from tandem.protocol.step import InsertOp, StepPlan

    class Bus:
        def send(self, identity: bytes, message: Any) -> None:
            encode(message)

    executor: Any = ClusterExecutor.__new__(ClusterExecutor)
    executor._specs = [type("Spec", (), {"rank": rank})() for rank in range(8)]
    executor._bus, executor._generation = Bus(), "0"
    plan = StepPlan(0, 0, inserts=[InsertOp("r", list(range(LONG)), LONG, SamplingParams())])
    began = time.thread_time()
    for _ in range(20):
        executor._broadcast(Plan(plan))
    return 1e3 * (time.thread_time() - began) / 20


def waits(rows: int, out: int = 200) -> float:
    """Percent of steps that wait as a row has left. Each row has `out` tokens on average, and the next joins a step later."""
    import mlx.core as mx
    from mlx_lm.models.cache import KVCache

    from tandem.runner import kv_store

    store = kv_store.KVStore(lambda: [KVCache()])
    if hasattr(store, "idles"):
        store.idles = True
    rng, names, left, waited = random.Random(0), iter(range(10**9)), {}, False

    def evaluate(*trees: Any) -> None:
        nonlocal waited
        waited |= any(any(tree) for tree in trees)

    class Watched:
        eval = staticmethod(evaluate)

        def __getattr__(self, name: str) -> Any:
            return getattr(mx, name)

    def join() -> None:
        cache = KVCache()
        cache.update_and_fetch(mx.zeros((1, 1, 1, 1)), mx.zeros((1, 1, 1, 1)))
        name = str(next(names))
        store.join(name, [cache], 1)
        left[name] = rng.randrange(1, 2 * out)

    for _ in range(rows):
        join()
    kv_store.mx = Watched()
    steps, waiting = 1000, 0
    for _ in range(steps):
        gone = [name for name in left if left[name] == 0]
        waited = False
        for name in gone:
            store.leave(name)
            del left[name]
        waiting += waited
        if len(store):
            store.batch()
            for layer in store._layers:
                layer._written = True
        for name in left:
            left[name] -= 1
        for _ in gone:
            join()
    kv_store.mx = mx
    return 100 * waiting / steps


if __name__ == "__main__":
    main()
