"""What ranks hold of the KV cache is what the scheduler counts, and never more than the limit."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from kv_invariants import check_store
from scheduler_invariants import check_invariants, make_limits
from tandem.errors import BatchDesync
from tandem.kv.budget import kv_shape
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import KVShape, StepPlan, StepResult
from tandem.runner.runner import Runner
from tandem.scheduler.scheduler import Scheduler

POSITION = 2 * 4
"""Bytes of a position: a float32 key and value of one element."""


class Stage:
    """One layer that keeps KV and computes nothing."""

    is_first = is_last = True
    one_by_one = ""
    hidden_size = 1
    adapters = SimpleNamespace(most=0)

    def make_caches(self) -> list[Any]:
        return [KVCache()]

    caches_of_all_stages = make_caches

    def forward(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        new = mx.zeros((tokens.shape[0], 1, tokens.shape[1], 1))
        for cache in caches:
            cache.update_and_fetch(new, new)
        return mx.zeros((*tokens.shape, 1))

    def head(self, hidden: mx.array) -> mx.array:
        return hidden

    final = head


class Rank:
    """Executes plans, and checks what is held after each of them."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.runner = Runner(
            Stage(),
            micro_batches=len(scheduler.batches.micro_batches),
            vocab_size=9,
            eos_token_ids=(),  # type: ignore[arg-type]
            samples=False,
            drafts=scheduler.speculation.most,
        )
        self.most = 0
        self.copies = 0
        self.shapes = [KVShape()] * len(scheduler.batches.micro_batches)

    def execute(self, plan: StepPlan) -> None:
        self.runner.execute(plan)
        micro_batches = self.runner._micro_batches
        assert [one.store.nbytes for one in micro_batches] == [POSITION * shape.size for shape in plan.kv_shapes]
        assert [one.shape for one in self.scheduler.batches.micro_batches] == plan.kv_shapes
        self.copies += sum(old != new for old, new in zip(self.shapes, plan.kv_shapes, strict=True))
        self.shapes = plan.kv_shapes
        prompts = sum(
            held.length for micro_batch in micro_batches for held in micro_batch.held.values() if held.caches is not None
        )
        held = sum(shape.size for shape in plan.kv_shapes) + prompts + self.scheduler.prefixes.positions
        assert held <= self.scheduler.limits.kv_tokens, plan
        assert all(shape.rows <= self.scheduler.limits.rows for shape in plan.kv_shapes)
        self.most = max(self.most, held)
        for micro_batch in micro_batches:
            check_store(micro_batch.store)


def made(micro_batches: int, kv_tokens: int, **changes: Any) -> Scheduler:
    base: dict[str, Any] = {
        "max_batch_size": 12,
        "prefill_chunk": 128,
        "max_context": 10**4,
        "eos_token_ids": frozenset(),
        "vocab_size": 9,
        "prefix_tokens": kv_tokens // 4,
    }
    return Scheduler(make_limits(micro_batches=micro_batches, kv_tokens=kv_tokens, **base | changes))


def request(name: str, prompt: list[int], tokens: int) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=prompt,
        params=SamplingParams(max_tokens=tokens, ignore_eos=True),
        pooling=None if tokens else "last",
    )


@pytest.mark.parametrize("seed", range(6))
def test_random_joins_and_leaves_hold_what_is_counted_and_never_more_than_the_limit(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = made(1 + seed % 3, rng.choice([1500, 4000]))
    rank, sent, under_way = Rank(scheduler), 0, []
    beginnings = [[rng.randrange(9) for _ in range(64)] for _ in range(2)]
    while sent < 40 or not scheduler.idle:
        if sent < 40 and rng.random() < 0.4:
            prompt = rng.choice(beginnings) + [rng.randrange(9) for _ in range(rng.choice([3, 40, 300, 900]))]
            scheduler.submit(request(f"r{sent}", prompt, rng.choice([0, 5, 60, 200])), seed=0)
            sent += 1
        if rng.random() < 0.05 and scheduler.sequences:
            scheduler.abort(rng.choice(list(scheduler.sequences)))
        if (plan := scheduler.next_plan()) is not None:
            rank.execute(plan)
            under_way.append(plan)
        elif under_way:
            plan = under_way.pop(0)
            scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled())))
        check_invariants(scheduler)
    assert rank.most > 0.9 * scheduler.limits.kv_tokens and not any(one.shape.size for one in scheduler.batches.micro_batches)


def test_rows_join_within_the_limit_and_mostly_without_a_copy() -> None:
    scheduler = made(1, 32_000, max_batch_size=32, prefill_chunk=1000, prefix_tokens=0)
    for number in range(32):
        scheduler.submit(request(f"r{number}", [number % 9] * 1000, 100), seed=0)
    rank = Rank(scheduler)
    for _ in range(40):
        if (plan := scheduler.next_plan()) is not None:
            rank.execute(plan)
            scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled())))
    assert scheduler.batches.running >= 27 and rank.most > 28_000
    assert rank.copies < 14


def test_capacity_has_standby_room_as_far_as_there_is_any_and_is_given_back_when_half_of_it_is_idle() -> None:
    held, copied = KVShape(), 0
    for rows in range(1, 33):
        before, held = held, kv_shape(held, rows, 1000, most=32)
        copied += before.rows * (before != held)
    assert held == (32, 1024) and copied < 3 * 32
    assert kv_shape(KVShape(28, 1024), 29, 1000, most=32, room=30_000) == (29, 1024)
    assert kv_shape(KVShape(28, 1024), 28, 1025, room=29_000) == (28, 1035)
    assert kv_shape(KVShape(2, 100), 2, 101, room=0) == (2, 101)
    held = KVShape(32, 4096)
    assert kv_shape(held, 17, 4000) == held
    assert kv_shape(held, 15, 2060) == (20, 2304)
    assert kv_shape(held, 0, 0) == (0, 0)
    for rows in (20, 19, 20, 21, 16):  # little comes and goes without a copy
        assert kv_shape(KVShape(20, 2304), min(rows, 20), 2060) == (20, 2304)


def test_a_rank_refuses_a_buffer_that_is_too_small_for_its_rows() -> None:
    scheduler = made(1, 4000)
    rank = Rank(scheduler)
    scheduler.submit(request("a", [1] * 100, 9), seed=0)
    assert (plan := scheduler.next_plan()) is not None
    rank.execute(plan)
    with pytest.raises(BatchDesync, match="1 rows of 99 positions is to hold 1 of 100"):
        rank.runner.execute(StepPlan(9, 0, kv_shapes=[KVShape(1, 99)]))
