"""The watchdog: what it holds for stuck, when, and in which words; and what it leaves alone."""

from __future__ import annotations

import itertools
import logging

import pytest

from tandem.errors import RankFailure
from tandem.executors.watchdog import AGAIN_S, CONTEXT, FLOOR_S, LEARNT, PASS, Pace, Watchdog, Workload
from tandem.protocol.control import Pong, Stepped
from tandem.protocol.request import SamplingParams, StructuredOutputs
from tandem.protocol.step import GrammarReady, InsertOp, PrefillOp, RankStep, SpecDecodePlan, SpecDecodeRow, StepPlan

TICK = 0.1


class RankGroup:
    """Ranks behind a watchdog, on a clock of their own."""

    def __init__(self, ranks: int = 2, step_timeout: float = 300.0) -> None:
        self.dog = Watchdog(ranks, step_timeout)
        self.now = 1000.0
        self.ranks = ranks
        self.answering = set(range(ranks))
        self.stopped: set[int] = set()
        self.waiting: set[int] = set()
        self.owed: dict[int, int] = {}
        """Pings not answered yet."""
        self.begun = dict.fromkeys(range(ranks), -1)
        self.steps = itertools.count()
        self.begin()

    def begin(self) -> None:
        self.dog.begin(self.now)
        self.dog.loaded(self.now, gpu=False)

    def plan(self) -> int:
        step = next(self.steps)
        self.dog.planned(StepPlan(step, 0, decode=["a", "b"]), self.now)
        return step

    def report(self, step: int, *ranks: int, busy: float = 0.01) -> None:
        for rank in ranks:
            self.dog.reported(Stepped(RankStep(rank, step, busy, 0)), self.now)

    def step(self, seconds: float = 0.01, busy: float = 0.01) -> None:
        step = self.plan()
        self.wait(seconds)
        self.report(step, *range(self.ranks), busy=busy)

    def wait(self, seconds: float) -> None:
        """Let time pass as the engine spends it: a look and perhaps a ping at each tick."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + TICK, until)
            if (number := self.dog.ping(self.now)) is not None:
                self.owed = dict.fromkeys(range(self.ranks), number)
            for rank in (self.answering - self.stopped) & set(self.owed):
                pong = Pong(rank, self.owed.pop(rank), self.begun[rank], rank in self.waiting)
                self.dog.answered(pong, self.now + 0.002)
            self.dog.look(self.now, lambda rank: rank in self.stopped)

    def until_failure(self, most: float = 400.0) -> tuple[float, RankFailure]:
        started = self.now
        with pytest.raises(RankFailure) as caught:
            self.wait(most)
        return self.now - started, caught.value


@pytest.fixture
def rank_group() -> RankGroup:
    """Two ranks whose pace is known."""
    one = RankGroup()
    for _ in range(LEARNT):
        one.step()
    return one


def test_a_rank_group_at_work_or_idle_is_left_alone(rank_group: RankGroup) -> None:
    for _ in range(50):
        rank_group.step(0.3)
    rank_group.wait(600)
    rank_group.step(4.0)


def test_a_stopped_rank_is_found_within_seconds_at_work_and_idle(rank_group: RankGroup) -> None:
    for busy in (True, False):
        if busy:
            rank_group.plan()
        rank_group.stopped = {1}
        seconds, failure = rank_group.until_failure()
        assert seconds < 1.5
        assert (failure.cause, failure.rank) == ("stopped", 1)
        assert "rank 1 stands still" in failure.message
        rank_group.stopped = set()
        rank_group.begin()


def test_a_short_stop_is_forgiven(rank_group: RankGroup) -> None:
    for _ in range(5):
        rank_group.stopped = {0}
        rank_group.wait(0.8)
        rank_group.stopped = set()
        rank_group.wait(0.3)


def test_a_rank_that_answers_nothing_is_found_though_its_state_is_unknown(rank_group: RankGroup) -> None:
    rank_group.plan()
    rank_group.answering = {0}
    seconds, failure = rank_group.until_failure()
    assert seconds < 5
    assert (failure.cause, failure.rank) == ("silent", 1)
    assert "has not answered" in failure.message


def test_a_rank_that_was_slow_to_answer_gets_more_time_but_is_not_said_to_answer(rank_group: RankGroup) -> None:
    rank_group.plan()
    rank_group.answering = {0}
    rank_group.wait(2.9)
    rank_group.answering = {0, 1}
    rank_group.wait(0.2)
    rank_group.answering = {0}
    seconds, failure = rank_group.until_failure()
    assert seconds < FLOOR_S
    assert (failure.cause, failure.rank) == ("silent", 1)
    assert "rank 1 does not answer either" in failure.message


def test_ranks_that_compile_a_grammar_work(rank_group: RankGroup) -> None:
    form = SamplingParams(structured_outputs=StructuredOutputs(json_object=True))
    rank_group.dog.planned(
        StepPlan(
            0, 0, inserts=[InsertOp("a", [1], 1, form), InsertOp("b", [1], 1, form), InsertOp("c", [1], 1, SamplingParams())]
        ),
        rank_group.now,
    )
    rank_group.report(0, 0, 1)
    assert rank_group.dog.works(1)
    rank_group.dog.take(GrammarReady(1, "a"), rank_group.now)
    assert rank_group.dog.works(1)
    rank_group.dog.planned(StepPlan(1, 0, removes=["b"]), rank_group.now)
    rank_group.report(1, 0, 1)
    assert not rank_group.dog.works(1)


def test_a_collective_that_is_stuck(rank_group: RankGroup) -> None:
    step = rank_group.plan()
    rank_group.begun = {0: step, 1: step}
    seconds, failure = rank_group.until_failure()
    assert FLOOR_S <= seconds < FLOOR_S + 2
    assert failure.cause == "stuck"
    assert "ranks 0, 1 answer, are inside it, and do not move: a collective is stuck" in failure.message


def test_a_cut_link_between_stages(rank_group: RankGroup) -> None:
    step = rank_group.plan()
    rank_group.begun = {0: step, 1: step}
    rank_group.report(step, 0)
    rank_group.waiting = {1}
    _, failure = rank_group.until_failure()
    assert (failure.cause, failure.rank) == ("link", 1)
    assert "rank 1 answers, and waits for another stage: the link to it brings nothing" in failure.message


def test_one_rank_that_does_not_move_while_the_others_wait_for_it(rank_group: RankGroup) -> None:
    step = rank_group.plan()
    rank_group.begun = {0: step, 1: step}
    rank_group.waiting = {1}
    _, failure = rank_group.until_failure()
    assert failure.cause == "stuck"
    assert "rank 0 answers, but does not move" in failure.message


def test_deadlines_follow_work_and_pace_and_step_timeout_is_the_ceiling() -> None:
    rank_group = RankGroup(step_timeout=100)
    rank_group.plan()
    assert rank_group.until_failure()[0] == pytest.approx(100, abs=1), "nothing is known yet"
    rank_group.begin()
    for _ in range(LEARNT):
        rank_group.step(0.2)
    rank_group.plan()
    short = rank_group.dog.deadline_s()
    rank_group.dog.planned(StepPlan(next(rank_group.steps), 0, prefill=[PrefillOp("a", 0, 512, True)]), rank_group.now)
    long = rank_group.dog.deadline_s()
    assert FLOOR_S < short < 10 < long < 100
    rank_group.dog.planned(StepPlan(next(rank_group.steps), 0, prefill=[PrefillOp("a", 0, 10**6, True)]), rank_group.now)
    assert rank_group.dog.deadline_s() == 100


def test_a_false_alarm_is_not_raised_twice(rank_group: RankGroup) -> None:
    """Everything is suddenly a hundred times slower, but moves: the next rank group is given time to show its pace."""
    rank_group.plan()
    rank_group.until_failure()
    rank_group.begin()
    for _ in range(30):
        rank_group.step(8.0)


def test_time_that_the_engine_lost_itself_counts_for_nobody(rank_group: RankGroup) -> None:
    step = rank_group.plan()
    rank_group.wait(1.0)
    rank_group.now += 3600
    rank_group.begun = {0: step, 1: step}
    assert FLOOR_S - 2 < rank_group.until_failure()[0] < FLOOR_S + 2


def test_a_slow_rank_that_moves_is_named_once_and_left_alone(rank_group: RankGroup, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(200):
        rank_group.step(0.05)
    assert rank_group.dog.slowdowns == pytest.approx([1, 1], abs=0.2)
    with caplog.at_level(logging.WARNING):
        for _ in range(40):
            step = rank_group.plan()
            rank_group.wait(0.5)
            rank_group.report(step, 0)
            rank_group.report(step, 1, busy=0.4)
    assert rank_group.dog.slowdowns[1] > 5 > 2 > rank_group.dog.slowdowns[0]
    assert [rank_group.dog.slowness(rank)[1] for rank in range(3)] == [False, True, False]
    assert [record.message.split(":")[0] for record in caplog.records] == ["rank 1 is slow"]


def test_a_slow_moment_is_forgotten_when_idle_and_when_ranks_are_replaced(
    rank_group: RankGroup, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="tandem")
    for forget in (lambda: rank_group.wait(20), rank_group.begin):
        for _ in range(200):
            rank_group.step(0.05)
        for _ in range(2):
            rank_group.step(0.9, busy=0.35)
        assert min(rank_group.dog.slowdowns) > 3
        forget()
        assert rank_group.dog.slowdowns == [1, 1]
    assert not caplog.records


@pytest.mark.parametrize(("hosts", "level"), [(1, logging.INFO), (2, logging.WARNING)])
def test_a_busy_machine_is_told_seldom_and_when_it_is_over(
    rank_group: RankGroup, hosts: int, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    rank_group.dog.loaded(rank_group.now, gpu=False, hosts=hosts)
    for _ in range(200):
        rank_group.step(0.05)
    began = rank_group.now
    with caplog.at_level(logging.INFO, logger="tandem"):
        while rank_group.now < began + 3000:
            for busy, steps in ((0.4, 100), (0.12, 100), (0.05, 200)):
                for _ in range(steps):
                    step = rank_group.plan()
                    rank_group.wait(0.5)
                    rank_group.report(step, 0)
                    rank_group.report(step, 1, busy=busy)
        for _ in range(100):
            rank_group.step(0.05)
    words = [record.message.split(":")[0] for record in caplog.records if record.message.startswith("rank")]
    assert words == ["rank 1 is slow", "rank 1 is at its usual pace again"] * (len(words) // 2)
    assert 1 <= len(words) // 2 <= 3000 / AGAIN_S + 1
    assert {record.levelno for record in caplog.records} == {level}


def test_a_slow_link_is_told_from_slow_ranks(rank_group: RankGroup, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(200):
        rank_group.step(0.05)
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            rank_group.step(1.0)
    assert rank_group.dog.slowdowns == pytest.approx([1, 1], abs=0.2)
    [record] = caplog.records
    assert "a link between them is slow" in record.message


def test_a_rank_group_that_loads_may_be_silent_for_longer() -> None:
    rank_group = RankGroup()
    rank_group.dog.begin(rank_group.now)
    rank_group.answering = set()
    seconds, failure = rank_group.until_failure()
    assert failure.cause == "silent" and 31 < seconds < 90


def test_work_counts_tokens_passes_and_context() -> None:
    load = Workload()
    insert = InsertOp("a", [1] * 100, 100, SamplingParams())
    first = load.count(StepPlan(0, 0, inserts=[insert], prefill=[PrefillOp("a", 0, 100, True)]))
    assert 100 < first < 130
    one = load.count(StepPlan(1, 0, decode=["a"]))
    assert one == pytest.approx(1 + PASS + 1 + 101 / CONTEXT) and one < first
    far = load.count(StepPlan(2, 0, prefill=[PrefillOp("b", 8192, 100, False)]))
    assert far > 2 * first
    assert load.count(StepPlan(3, 0, removes=["a"])) == 1


def test_work_counts_drafts_and_what_a_draft_model_reads() -> None:
    load = Workload()
    insert = InsertOp("a", [1] * 100, 100, SamplingParams())
    load.count(StepPlan(0, 0, inserts=[insert], prefill=[PrefillOp("a", 0, 100, True)]))
    one = load.count(StepPlan(1, 0, decode=["a"]))

    def named(step: int, length: int, drafts: int, ask: int) -> StepPlan:
        return StepPlan(
            step, 0, decode=["a"], spec_decode_plan=SpecDecodePlan([SpecDecodeRow("a", length, [7] * (1 + drafts))], ask)
        )

    assert load.count(named(2, 101, 4, 0)) == pytest.approx(one + 4, abs=0.1)
    first, second = load.count(named(3, 103, 0, 4)), load.count(named(4, 104, 4, 4))
    assert first > second + 90 > one + 90


def test_pace_remembers_the_slowest_and_the_usual() -> None:
    pace = Pace()
    for _ in range(500):
        pace.note(0.1, 10)
    pace.note(5.0, 10)
    assert pace.slowest == pytest.approx(0.5)
    assert pace.usual == pytest.approx(0.01, rel=0.2)
    for _ in range(5000):
        pace.note(0.1, 10)
    assert pace.slowest == pytest.approx(0.01, rel=0.2)
