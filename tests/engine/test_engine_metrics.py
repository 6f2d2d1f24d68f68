"""What the engine counts."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from tandem.engine import metrics
from tandem.engine.metrics import EngineMetrics
from tandem.engine.status_report import FEWEST, KEPT_STEPS, StageLatency, StatusReport
from tandem.protocol.control import Output, Timing
from tandem.protocol.request import SamplingParams
from tandem.protocol.step import InsertOp, RankStep, StepPlan
from tandem.speculation.proposers import SpeculationCounts


def value(text: str, sample: str) -> float:
    found = re.search(rf"^tandem_{re.escape(sample)} (\S+)$", text, re.MULTILINE)
    assert found, text
    return float(found[1])


def test_what_counts_upwards_is_a_counter_and_nothing_else_is_called_total() -> None:
    one = EngineMetrics()
    one.scheduled(2, SpeculationCounts(3, 9, 4))
    one.scheduled(5, SpeculationCounts(4, 12, 4))
    text = one.text().decode()
    assert value(text, "num_preemptions_total") == 5
    assert [value(text, f"spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")] == [4, 12, 4]
    for name, kind in re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE):
        assert (kind == "counter") == name.endswith("_total"), (name, kind)


def test_tokens_that_come_together_each_count_as_a_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    one = EngineMetrics()
    one.arrived("a", 7)
    for later, tokens in ((1.0, 1), (0.4, 4), (0.1, 1)):
        now[0] += later
        one.produced([Output("a", [1] * tokens)])
    text = one.text().decode()
    assert value(text, "inter_token_latency_seconds_count") == 5
    assert value(text, "inter_token_latency_seconds_sum") == pytest.approx(0.5)
    assert value(text, 'inter_token_latency_seconds_bucket{le="0.25"}') == 5


def test_a_request_that_its_client_has_all_of_is_a_success() -> None:
    one = EngineMetrics()
    one.arrived("a", 7)
    one.produced([Output("a", [1])])
    one.ended("a", "stop")
    text = one.text().decode()
    assert value(text, 'request_success_total{finished_reason="stop"}') == 1
    assert value(text, "e2e_request_latency_seconds_count") == 1
    assert value(text, "request_aborted_total") == 0


def joined(*names: str) -> StepPlan:
    return StepPlan(0, 0, inserts=[InsertOp(name, [1], 1, SamplingParams(max_tokens=9)) for name in names])


def test_the_wait_for_a_batch_and_the_prompt_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    one = EngineMetrics()
    one.arrived("a", 700)
    now[0] += 2
    one.admitted(joined("a"))
    now[0] += 0.5
    assert one.produced([Output("a", [1])]) == {"a": Timing(2.0, 0.5)}
    now[0] += 0.25
    assert one.produced([Output("a", [1])]) == {}
    now[0] += 4  # its ranks were lost
    one.admitted(joined("a"))
    now[0] += 1
    assert one.produced([Output("a", [1], finish_reason="length")]) == {"a": Timing(4.0, 1.0)}, (
        "from the last token that there was"
    )
    text = one.text().decode()
    assert value(text, "request_queue_time_seconds_sum") == 2 and value(text, "request_prefill_time_seconds_sum") == 0.5
    assert value(text, "request_decode_time_seconds_sum") == 5.25
    assert value(text, "request_prompt_tokens_sum") == value(text, "prefix_cache_queries_total") == 700
    assert value(text, "request_generation_tokens_sum") == 3
    assert "_created" not in text


def test_what_another_engine_began_to_answer_has_no_prompt_and_no_first_token_here() -> None:
    one = EngineMetrics()
    one.arrived("a", 7, begun=True)
    one.produced([Output("a", [1])])
    text = one.text().decode()
    assert value(text, "prompt_tokens_total") == value(text, "time_to_first_token_seconds_count") == 0
    assert value(text, "inter_token_latency_seconds_count") == value(text, "generation_tokens_total") == 1


def test_the_time_between_stages_is_what_their_work_leaves() -> None:
    stage_latency = StageLatency({0: 0, 1: 0, 2: 1})
    for step in range(FEWEST + 3):
        assert stage_latency.seconds(2) == 0.0 or step >= FEWEST
        begin = 10.0 * step
        stage_latency.note(RankStep(0, step, 0.2, 0), begin + 0.2)
        stage_latency.note(RankStep(1, step, 0.3, 0), begin + 0.3)
        stage_latency.note(RankStep(2, step, 0.4, 0), begin + 0.3 + 0.002 + 0.4)
    assert stage_latency.seconds(2) == pytest.approx(0.002)
    assert stage_latency.seconds(0) == stage_latency.seconds(1) == 0.0, "no stage is before theirs"


def test_steps_whose_end_never_comes_are_forgotten() -> None:
    stage_latency = StageLatency({0: 0, 1: 1})
    for step in range(10 * KEPT_STEPS):
        stage_latency.note(RankStep(0, step, 0.1, 0), step)
    assert len(stage_latency._done) <= KEPT_STEPS


def test_a_rank_that_the_watchdog_finds_slow_is_one_event_and_its_recovery_another():
    told, measured = [], iter([(1.0, False), (6.0, True), (7.0, True), (1.0, False)])
    rank_group = SimpleNamespace(
        layout=SimpleNamespace(ranks=[]),
        ready=[],
        executor=SimpleNamespace(watchdog=SimpleNamespace(slowness=lambda _: next(measured))),
        history=SimpleNamespace(note=lambda kind, text, **_: told.append((kind, text.partition(";")[0]))),
    )
    report = StatusReport(rank_group, EngineMetrics())
    assert [report._slowdown(0) for _ in range(4)] == [1.0, 6.0, 7.0, 1.0]
    slow = ("rank_slow", "part 1 is slow: steps take 6.0 times the usual time")
    assert told == [slow, ("rank_usual", "part 1 is at its usual pace again")]
