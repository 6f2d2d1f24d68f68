"""When the reports of a step count, and requests that are run over an executor without an engine."""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import pytest

from engines import stepped
from scheduler_invariants import make_limits
from tandem.engine.result_collector import ResultCollector, run_offline
from tandem.errors import RankFailure
from tandem.executors.executor import Executor, Progress
from tandem.protocol.control import Ready, Stepped
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import RankStep, StepPlan, StepResult


class Place(NamedTuple):
    """What counts of a `StageSpec` here."""

    rank: int
    stage: int
    tp_rank: int


RANKS: Any = (Place(0, 0, 0), Place(1, 0, 1), Place(2, 1, 0))
"""Two ranks of a first stage, and one of a second."""


def report(rank: int, before: int | None, after: int = 0, step: int = 3) -> Stepped:
    digest = None if before is None else (before, after)
    return Stepped(RankStep(rank, step, 0.1, 0, digest=digest), 0, StepResult(step, 0, [9]) if rank == 2 else None)


def test_the_last_report_of_a_step_makes_it_count() -> None:
    result_collector = ResultCollector()
    reports = [report(2, 20, 30), report(0, 10, 20), report(1, 10, 20)]
    assert [result_collector.complete(one, RANKS) for one in reports] == [None, None, reports[0]]
    assert result_collector.complete(report(0, None), RANKS) is None, "the next time it is another step"


def test_steps_do_not_mix() -> None:
    result_collector = ResultCollector()
    found = [result_collector.complete(report(rank, None, step=step), RANKS) for rank in range(3) for step in (3, 4)]
    assert [one.step.step_id for one in found if one is not None] == [3, 4]


def test_what_ended_ranks_reported_does_not_count_for_the_next() -> None:
    result_collector = ResultCollector()
    for rank in (0, 2):
        result_collector.complete(report(rank, None), RANKS)
    result_collector.forget()
    assert result_collector.complete(report(1, None), RANKS) is None


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        (((10, 20), (10, 21), (20, 30)), "rank 1 holds other activations in step 3"),
        (((10, 20), (11, 20), (20, 30)), "rank 1 holds other activations in step 3"),
        (((10, 20), (10, 20), (21, 30)), "that stage 1 sent in step 3"),
    ],
)
def test_ranks_that_disagree_make_it_no_step(digests: tuple[tuple[int, int], ...], words: str) -> None:
    result_collector = ResultCollector()
    *first, last = [report(rank, before, after) for rank, (before, after) in enumerate(digests)]
    assert [result_collector.complete(one, RANKS) for one in first] == [None, None]
    with pytest.raises(RankFailure, match=words) as raised:
        result_collector.complete(last, RANKS)
    assert raised.value.cause == "link" and "does not count" in raised.value.message


class Slow(Executor):
    """One rank, of whose steps nothing is heard the first ten times."""

    def __init__(self) -> None:
        self.plans: deque[StepPlan] = deque()
        self.asked = 0

    def start(self, progress: Progress | None = None) -> list[Ready]:
        return []

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)

    def collect(self, timeout_s: float) -> list[Stepped]:
        self.asked += 1
        if self.asked <= 10:
            return []
        return stepped(self.plans.popleft(), 1)

    def close(self) -> None: ...


def test_whoever_waits_for_it_is_alive_meanwhile() -> None:
    """The self-check's steps may take long, or be stuck until the watchdog says so; the supervisor must not think that the
    engine is."""
    executor, called = Slow(), []
    executor.on_wait = lambda: called.append(executor.asked)
    request = EngineRequest(request_id="a", prompt=[1, 2], params=SamplingParams(max_tokens=2))
    assert run_offline(executor, make_limits(), [request], RANKS[:1]).answers["a"].tokens == [5, 5]
    assert called[:11] == list(range(11))
