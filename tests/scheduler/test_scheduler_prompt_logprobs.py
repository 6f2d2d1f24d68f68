"""Log probabilities of a prompt come whole and once, whatever happens on the way: each stands for its position here."""

from __future__ import annotations

import random
import struct
from collections import deque

import pytest

from scheduler_invariants import check_invariants
from tandem.protocol.control import Output, Refused
from tandem.protocol.logprobs import PromptLogprobs, joined
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepPlan, StepResult
from tandem.scheduler.limits import Limits
from tandem.scheduler.scheduler import Scheduler

LENGTH = 190


def scored(first: int, count: int, k: int) -> PromptLogprobs:
    """Of the tokens `first` and those after it; the most likely ones are their positions too."""
    places = range(first, first + count)
    tops = [place for place in places for _ in range(k)]
    return PromptLogprobs(
        k,
        struct.pack(f"<{count}f", *places),
        struct.pack(f"<{count}i", *places),
        struct.pack(f"<{count * k}f", *tops),
        struct.pack(f"<{count * k}i", *tops),
    )


def result(plan: StepPlan, prompts: dict[str, int], token: int) -> StepResult:
    asked = [op for op in plan.prefill if op.prompt_logprobs is not None]
    found = {
        op.request_id: scored(op.start + 1, min(op.count, prompts[op.request_id] - 1 - op.start), op.prompt_logprobs or 0)
        for op in asked
    }
    return StepResult(plan.step_id, plan.micro_batch, [token] * len(plan.sampled()), prompt_logprobs=found)


@pytest.mark.parametrize("seed", range(40))
def test_random_histories_bring_all_of_them_once(seed: int) -> None:
    rng = random.Random(seed)
    scheduler = Scheduler(
        Limits(
            micro_batches=rng.choice([1, 2, 3]),
            max_batch_size=rng.choice([1, 4, 8]),
            prefill_chunk=rng.choice([1, 5, 64]),
            kv_tokens=rng.choice([200, 400, 100_000]),
            max_context=LENGTH,
            max_queued_requests=1000,
            max_queue_tokens=10**6,
            eos_token_ids=frozenset([2]),
            vocab_size=50,
            prefix_tokens=rng.choice([0, 1000]),
            prefix_trimmable=True,
        )
    )
    lengths = {f"r{i}": rng.choice([1, 2, rng.randint(3, 100), rng.randint(3, LENGTH)]) for i in range(30)}
    asked = {name: rng.choice([None, 0, 2]) for name in lengths}
    live: set[str] = set()
    brought: dict[str, list[PromptLogprobs]] = {name: [] for name in lengths}
    waiting, plans = deque(lengths), deque[StepPlan]()
    for _ in range(20_000):
        if waiting and rng.random() < 0.3:
            name = waiting.popleft()
            room = LENGTH - lengths[name]
            least = 1 if asked[name] is None else 0
            if room < least:
                continue
            params = SamplingParams(max_tokens=rng.randint(least, min(room, 60)), prompt_logprobs=asked[name])
            scheduler.submit(EngineRequest(request_id=name, prompt=[1] * lengths[name], params=params), seed=1)
            live.add(name)
        if live and rng.random() < 0.02:
            name = rng.choice(sorted(live))
            assert scheduler.abort(name)
            live.remove(name)
        if rng.random() < 0.01:
            live -= {message.request_id for message in scheduler.restart() if isinstance(message, Refused)}
            plans.clear()
        if (plan := scheduler.next_plan()) is not None:
            plans.append(plan)
        elif plans:
            plan = plans.popleft()
            for message in scheduler.update(result(plan, lengths, rng.choice([2] + [5] * 30))):
                assert isinstance(message, Output) and message.request_id in live
                if message.prompt_logprobs is not None:
                    brought[message.request_id].append(message.prompt_logprobs)
                if message.finish_reason:
                    live.remove(message.request_id)
                    check(brought[message.request_id], lengths[message.request_id], asked[message.request_id])
        check_invariants(scheduler)
        if not waiting and not live and scheduler.idle:
            return
    raise AssertionError(f"never done: {live}")


def check(brought: list[PromptLogprobs], length: int, k: int | None) -> None:
    """All places but the first, in their order; nothing for one that did not ask."""
    if k is None:
        assert not brought
        return
    [found] = brought
    assert [(one.logprob, one.rank) for one in found] == [(place, place) for place in range(1, length)]
    assert [one.top for one in found] == [[(place, float(place))] * k for place in range(1, length)]


def test_parts_can_be_cut_and_joined() -> None:
    whole = scored(1, 9, 2)
    assert joined([scored(1, 4, 2), scored(5, 5, 2)]) == whole and whole.after(4) == scored(5, 5, 2)
    assert len(whole.after(20)) == 0 and len(joined([])) == 0 and joined([]).finite
    assert whole.finite and not PromptLogprobs(0, struct.pack("<2f", 0.0, float("nan")), bytes(8)).finite
