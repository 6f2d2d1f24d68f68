"""Requests run over an executor without an engine."""

from __future__ import annotations

from collections import deque

from tandem.engine.drive import drive
from tandem.executors.base import Executor, Progress
from tandem.protocol.control import Ready, Stepped
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.step import RankStep, StepPlan, StepResult
from tandem.scheduler.limits import Limits


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
        plan = self.plans.popleft()
        return [Stepped(RankStep(0, plan.step_id, 0.0, 0),
                        result=StepResult(plan.step_id, plan.lane, [5] * len(plan.sampled())))]

    def close(self) -> None: ...


def test_whoever_waits_for_it_is_alive_meanwhile() -> None:
    """The canary's steps may take long, or be stuck until the watchdog says so; the supervisor must not think that the
    engine is."""
    executor, called = Slow(), []
    executor.on_wait = lambda: called.append(executor.asked)
    limits = Limits(lanes=1, max_batch_size=1, prefill_chunk=8, kv_tokens=100, max_context=100, max_queue=1,
                    max_queue_tokens=100, eos_token_ids=frozenset(), vocab_size=50)
    request = EngineRequest(request_id="a", prompt=[1, 2], params=SamplingParams(max_tokens=2))
    assert drive(executor, limits, [request], ranks=1).answers["a"].tokens == [5, 5]
    assert called[:11] == list(range(11))
