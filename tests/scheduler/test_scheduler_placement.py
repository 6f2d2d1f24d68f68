"""Sequences of like lengths share a micro-batch, without micro-batches that differ much in rows."""

from __future__ import annotations

import random

from scheduler_invariants import check_invariants, make_limits
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepResult
from tandem.scheduler.scheduler import Scheduler


def scheduler(**changes: object) -> Scheduler:
    return Scheduler(
        make_limits(
            **{"micro_batches": 2, "max_batch_size": 16, "prefill_chunk": 4096, "kv_tokens": 100_000, "max_context": 20_000}
            | changes
        )
    )


def submit(one: Scheduler, name: str, length: int) -> None:
    one.submit(EngineRequest(request_id=name, prompt=[1] * length, params=SamplingParams(max_tokens=50)), seed=0)


def run(one: Scheduler, steps: int) -> None:
    for _ in range(steps):
        if plan := one.next_plan():
            one.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled())))
            check_invariants(one)


def lengths(one: Scheduler) -> list[list[int]]:
    return [sorted(sequence.prompt_len for sequence in micro_batch.members.values()) for micro_batch in one.batches.micro_batches]


def test_a_long_context_is_paid_for_by_few():
    one = scheduler()
    submit(one, "long", 10_000)
    run(one, 2)
    for number in range(7):
        submit(one, f"short {number}", 200)
        run(one, 2)
    beside = next(micro_batch for micro_batch in one.batches.micro_batches if "long" in micro_batch.members)
    assert len(beside.members) <= 3
    assert one.batches.kv_positions < 45_000  # four rows of 10,000 and more, were they dealt out in turn


def test_the_same_lengths_are_dealt_out_evenly():
    one = scheduler()
    for number in range(8):
        submit(one, str(number), 100)
    run(one, 12)
    assert [len(micro_batch.members) for micro_batch in one.batches.micro_batches] == [4, 4]


def test_two_lengths_part():
    one = scheduler()
    for number, length in enumerate([4000, 50] * 4):
        submit(one, str(number), length)
        run(one, 2)
    assert sorted(map(len, lengths(one))) in ([3, 5], [4, 4])
    assert one.batches.kv_positions <= 5 * 4100 + 3 * 100


def test_no_micro_batch_starves_whatever_comes():
    rng = random.Random(3)
    one = scheduler(micro_batches=3)
    for number in range(16):
        submit(one, str(number), rng.choice([10, 300, 5000]))
        run(one, rng.randrange(4))
    run(one, 30)
    rows = [len(micro_batch.members) for micro_batch in one.batches.micro_batches]
    assert sum(rows) == 16
    assert max(rows) - min(rows) <= 5
