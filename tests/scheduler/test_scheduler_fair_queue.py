"""Fair shares: nobody starves, and groups that always have work get it in proportion to their weights."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from scheduler_invariants import check_invariants, make_limits
from tandem.errors import OverloadedError, RequestError
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepPlan, StepResult
from tandem.scheduler.scheduler import BLOCKED_PLANS, Scheduler


class Load:
    """A scheduler with ranks that answer at once, and a count of the work that each group gets."""

    def __init__(self, **changes: object) -> None:
        self.scheduler = Scheduler(make_limits(**{"prefill_chunk": 32} | changes))
        self.work: Counter[str] = Counter()
        self.open: Counter[str] = Counter()
        self.done: list[str] = []
        self._groups: dict[str, str] = {}
        self._plans: deque[StepPlan] = deque()

    def send(self, group: str, prompt: int, output: int, weight: float = 1.0) -> str:
        name = f"r{len(self._groups)}"
        self.scheduler.submit(
            EngineRequest(
                request_id=name, prompt=[1] * prompt, group=group, weight=weight, params=SamplingParams(max_tokens=output)
            ),
            seed=1,
        )
        self._groups[name] = group
        self.open[group] += 1
        return name

    def step(self) -> None:
        """Send what can be sent, and take one result."""
        while (plan := self.scheduler.next_plan()) is not None:
            self._plans.append(plan)
            for op in plan.prefill:
                self.work[self._groups[op.request_id]] += op.count
            for request_id in plan.decode:
                self.work[self._groups[request_id]] += 1
        if not self._plans:
            return
        plan = self._plans.popleft()
        for message in self.scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled()))):
            assert isinstance(message, Output)
            if message.finish_reason:
                self.open[self._groups[message.request_id]] -= 1
                self.done.append(message.request_id)
        check_invariants(self.scheduler)

    def steps_until(self, name: str, most: int) -> int:
        for count in range(most):
            if name in self.done:
                return count
            self.step()
        raise AssertionError(f"{name} starves")


@pytest.mark.parametrize("seed", range(5))
def test_groups_that_always_have_work_share_it_by_weight(seed: int) -> None:
    rng = random.Random(seed)
    load = Load(micro_batches=rng.choice([1, 2]), max_batch_size=rng.choice([2, 4]))
    weights = {f"g{i}": rng.choice([0.5, 1.0, 1.0, 2.0]) for i in range(rng.randint(2, 4))}
    shapes = {group: (rng.randint(2, 60), rng.randint(2, 30)) for group in weights}
    for _ in range(6000):
        for group, weight in weights.items():
            while load.open[group] < 12:
                prompt, output = shapes[group]
                load.send(group, rng.randint(1, prompt), rng.randint(1, output), weight)
        load.step()
    total = sum(load.work.values())
    for group, weight in weights.items():
        assert load.work[group] / total == pytest.approx(weight / sum(weights.values()), rel=0.1), load.work


def test_one_client_that_floods_does_not_hold_up_another() -> None:
    load = Load(max_batch_size=4)
    for _ in range(500):
        load.send("flood", 30, 20)
    for _ in range(100):
        load.step()
    waits = [load.steps_until(load.send("small", 5, 5), 200) for _ in range(10)]
    assert max(waits) < 60
    assert len(load.scheduler.waiting) > 200, "the flood is still there"


@pytest.mark.parametrize("held", ["rows", "memory"])
def test_a_batch_full_of_long_answers_makes_way(held: str) -> None:
    load = Load(max_batch_size=4) if held == "rows" else Load(kv_tokens=500, max_context=400)
    for _ in range(8):
        load.send("long", 10, 300)
    for _ in range(20):
        load.step()
    assert load.steps_until(load.send("small", 5, 5), 3 * BLOCKED_PLANS) > 0
    assert not load.done[:-1], "none of the long ones has ended before"
    while any(load.open.values()):
        load.step()
    assert len(load.done) == 9, "those that made way are answered in full"


def test_a_group_without_rivals_keeps_all_places() -> None:
    load = Load(max_batch_size=4)
    for _ in range(20):
        load.send("only", 10, 20)
    while any(load.open.values()):
        load.step()
    assert load.scheduler.batches.preemptions == 0


def test_idle_groups_save_nothing_up_and_nobody_pays_for_a_free_machine() -> None:
    load = Load(max_batch_size=2)
    for _ in range(50):
        load.send("early", 20, 20)
    load.send("late", 5, 5)
    while load.open["late"] or len(load.done) < 40:
        load.step()
    for _ in range(60):
        load.send("late", 20, 20)
        load.send("early", 20, 20)
    before = load.work.copy()
    for _ in range(800):
        load.step()
    assert load.work["late"] - before["late"] == pytest.approx(load.work["early"] - before["early"], rel=0.15)


def test_ever_new_groups_do_not_starve_an_old_one() -> None:
    load = Load(max_batch_size=1)
    old = [load.send("old", 50, 50) for _ in range(5)]
    for i in range(3000):
        if len(load.scheduler.waiting) < 12:
            load.send(f"new{i}", 3, 3)
        load.step()
    assert set(old) <= set(load.done)
    assert len(load.scheduler.fair_queue._groups) < 30, "accounts of clients that have gone are not kept for ever"


def test_one_group_cannot_fill_the_queue_for_the_others() -> None:
    load = Load(max_queued_requests=8, max_queue_tokens=10**6)
    for _ in range(8):
        load.send("flood", 4, 4)
    with pytest.raises(OverloadedError, match="max_queued_requests"):
        load.send("flood", 4, 4)
    load.send("other", 4, 4)
    load.send("third", 4, 4)
    with pytest.raises(OverloadedError, match="max_queued_requests"):
        load.send("fourth", 4, 4)


def test_the_queue_is_bounded_in_tokens_too() -> None:
    load = Load(max_queue_tokens=100)
    load.send("flood", 90, 4)
    with pytest.raises(OverloadedError, match="max_queue_tokens"):
        load.send("flood", 20, 4)
    load.send("other", 20, 4)
    with pytest.raises(OverloadedError, match="max_queue_tokens"):
        load.send("third", 20, 4)


@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_weights_are_checked(weight: float) -> None:
    with pytest.raises(RequestError, match="weight"):
        Load().send("a", 4, 4, weight)


def test_a_weight_that_leaves_takes_no_small_one_along() -> None:
    """10^12 and 10^-5: their sum in floating point is the large one alone."""
    load = Load()
    load.send("small", 4, 4, 1e-5)
    large = load.send("large", 4, 4, 1e12)
    assert load.scheduler.abort(large)
    while not load.scheduler.idle:
        load.step()
