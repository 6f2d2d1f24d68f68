"""A request that kills rank groups is found, and the innocent beside it are served."""

from __future__ import annotations

from collections import deque

import pytest

from scheduler_invariants import check_invariants, make_limits
from tandem.protocol.control import Output, Refused
from tandem.protocol.quarantine import ANYWHERE, CLEAR, QuarantineRecord
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import StepPlan, StepResult
from tandem.scheduler.scheduler import Scheduler
from tandem.scheduler.sequence import Sequence


def a_scheduler(micro_batches: int = 1) -> Scheduler:
    return Scheduler(make_limits(micro_batches=micro_batches, kv_tokens=5000, max_context=400))


def submit(scheduler: Scheduler, name: str, tokens: int = 40, quarantine_record: QuarantineRecord | None = None) -> None:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    scheduler.submit(EngineRequest(request_id=name, prompt=[1] * 20, params=params, quarantine_record=quarantine_record), seed=1)


def resting_for(scheduler: Scheduler) -> Sequence | None:
    """For whom nothing runs for a while, as the engine sees it."""
    return None if (suspect := scheduler.suspect) is None or suspect.may_be_tried else suspect


class RankGroup:
    """Executes plans two at a time, and dies when one of `killers` has produced so many tokens."""

    def __init__(self, scheduler: Scheduler, killers: dict[str, int]) -> None:
        self.scheduler, self.killers = scheduler, killers
        self.deaths = 0
        self.produced: dict[str, int] = {}
        self.refused: list[str] = []
        self.rests = 0

    def run(self) -> None:
        plans: deque[StepPlan] = deque()
        for _ in range(20_000):
            while (plan := self.scheduler.next_plan()) is not None:
                plans.append(plan)
            if not plans and (resting := resting_for(self.scheduler)) is not None:
                self.rests += 1
                resting.rested = True
                continue
            if not plans:
                assert self.scheduler.idle
                return
            plan = plans.popleft()
            if any(self.killers.get(one, 10**6) <= self.produced.get(one, 0) for one in working(plan)):
                self.deaths += 1
                plans.clear()
                self.refused += [message.request_id for message in self.scheduler.restart() if isinstance(message, Refused)]
            else:
                self.take(plan)
            check_invariants(self.scheduler)
        raise AssertionError("it never ends")

    def take(self, plan: StepPlan) -> None:
        for message in self.scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled()))):
            assert isinstance(message, Output)
            self.produced[message.request_id] = self.produced.get(message.request_id, 0) + len(message.tokens)


def working(plan: StepPlan) -> list[str]:
    return [*plan.decode, *(op.request_id for op in plan.prefill)]


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("at", [0, 1, 15, 30])
def test_the_one_that_kills_is_refused_and_nobody_else(micro_batches: int, at: int) -> None:
    scheduler = a_scheduler(micro_batches)
    for name in ("a", "b", "killer", "c", "d"):
        submit(scheduler, name)
    rank_group = RankGroup(scheduler, {"killer": at})
    rank_group.run()
    assert rank_group.refused == ["killer"]
    assert (rank_group.deaths, rank_group.rests) == (4, 1), "twice in company, twice alone, and once it was looked without it"
    assert {name: count for name, count in rank_group.produced.items() if name != "killer"} == dict.fromkeys("abcd", 40)


def test_two_that_kill_are_both_found() -> None:
    scheduler = a_scheduler()
    for name in ("k1", "a", "k2", "b"):
        submit(scheduler, name)
    rank_group = RankGroup(scheduler, {"k1": 3, "k2": 12})
    rank_group.run()
    assert sorted(rank_group.refused) == ["k1", "k2"]
    assert rank_group.deaths <= 10
    assert rank_group.produced["a"] == rank_group.produced["b"] == 40


def test_rank_groups_that_die_for_other_reasons_cost_nobody_an_answer() -> None:
    """Each death comes after some progress."""
    scheduler = a_scheduler()
    submit(scheduler, "a", tokens=100)
    submit(scheduler, "b", tokens=100)
    rank_group = RankGroup(scheduler, {})
    for target in (20, 40, 60, 80):
        while rank_group.produced.get("a", 0) < target:
            plan = scheduler.next_plan()
            assert plan is not None
            rank_group.take(plan)
        assert scheduler.next_plan()
        assert scheduler.restart() == []
    rank_group.run()
    assert rank_group.produced == {"a": 100, "b": 100}


def test_new_requests_wait_while_a_suspect_runs_alone() -> None:
    scheduler = a_scheduler()
    submit(scheduler, "suspect", quarantine_record=QuarantineRecord(company=2, end=20 + 8))
    submit(scheduler, "new")
    rank_group = RankGroup(scheduler, {})
    together = []
    assert scheduler.next_plan() is None, "its api is to know first, since what it kills at once says nothing more"
    assert (suspect := scheduler.suspect) is not None and suspect.may_be_tried and not suspect.expected
    suspect.announced = True
    assert (scheduler.suspect, scheduler.next_plan()) == (suspect, None)
    suspect.noted = True
    while not scheduler.idle:
        plan = scheduler.next_plan()
        assert plan is not None
        together.append((rank_group.produced.get("suspect", 0), sorted(working(plan))))
        rank_group.take(plan)
    assert all(names == ["suspect"] for count, names in together if count < CLEAR)
    assert any(names == ["new", "suspect"] for count, names in together), "cleared, it shares the batch again"
    assert rank_group.produced == {"suspect": 40, "new": 40}


def dies(scheduler: Scheduler, steps: int, *, blame: bool = True) -> list[str]:
    """The rank group does so many steps and dies in the next one; returns who is refused."""
    if (resting := resting_for(scheduler)) is not None:
        resting.rested = True
    plans: deque[StepPlan] = deque()
    for _ in range(steps + 1):
        while (plan := scheduler.next_plan()) is not None:
            plans.append(plan)
        if len(plans) and _ < steps:
            plan = plans.popleft()
            scheduler.update(StepResult(plan.step_id, plan.micro_batch, [5] * len(plan.sampled())))
    return [one.request_id for one in scheduler.restart(blame=blame) if isinstance(one, Refused)]


def test_what_is_nobodys_doing_is_held_against_nobody() -> None:
    """A signal that only others send, a machine that is lost, a rank that had nothing to do."""
    scheduler = a_scheduler()
    submit(scheduler, "a")
    for _ in range(20):
        assert dies(scheduler, 0, blame=False) == []
    assert not scheduler.sequences["a"].quarantine_record.suspect


def test_a_rank_group_that_dies_idle_clears_all_suspects() -> None:
    scheduler = a_scheduler()
    for name in "ab":
        submit(scheduler, name)
    for _ in range(3):
        dies(scheduler, 0)
    assert scheduler.sequences["a"].quarantine_record.alone == 1 and resting_for(scheduler) is scheduler.sequences["a"]
    assert scheduler.next_plan() is None, "nothing runs while it is looked whether the rank group lives without it"
    assert scheduler.restart(died=False) == [], "ended on purpose"
    assert resting_for(scheduler) is scheduler.sequences["a"]
    assert scheduler.restart() == []
    assert resting_for(scheduler) is None
    assert not any(one.quarantine_record.suspect for one in scheduler.sequences.values())


def test_one_that_dies_alone_at_other_places_is_given_more_tries() -> None:
    """Places that it had passed once cannot be what kills."""
    quarantine_record = QuarantineRecord(company=2)
    quarantine_record.died(100, 110, alone=True)
    assert quarantine_record.alone == 1 and quarantine_record.rests
    for _ in range(ANYWHERE - 2):
        quarantine_record.died(20, 40, alone=True)
        assert not quarantine_record.guilty
    quarantine_record.died(20, 40, alone=True)
    assert quarantine_record.guilty


def test_the_same_place_twice_is_enough() -> None:
    quarantine_record = QuarantineRecord(company=2)
    quarantine_record.died(100, 110, alone=True)
    assert not quarantine_record.guilty
    quarantine_record.died(96, 104, alone=True)
    assert quarantine_record.guilty
    assert quarantine_record.passed(119) and not quarantine_record.guilty
