"""When clients who are refused hear that they should come back."""

from __future__ import annotations

from pathlib import Path

import pytest

from submitted import ask
from tandem import LLM
from tandem.engine.engine import Engine
from tandem.engine.metrics import LONGEST_S, UNKNOWN_S, DrainRate
from tandem.errors import OverloadedError
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.testing import tiny_model


def test_half_of_the_queue_at_the_measured_rate() -> None:
    rate = DrainRate()
    assert rate.retry_after(1000) == UNKNOWN_S
    for tenth in range(100):
        rate.observe(tenth / 10, 20 * tenth, waiting=True)  # 200 tokens a second
    assert rate.retry_after(4000) == pytest.approx(10.0)
    assert rate.retry_after(8000) == pytest.approx(20.0)
    assert rate.retry_after(10) == 1.0
    assert rate.retry_after(10**9) == LONGEST_S


def test_a_slower_engine_is_noticed_and_idle_time_is_not_counted() -> None:
    rate = DrainRate()
    for second in range(10):
        rate.observe(second, 1000 * second, waiting=True)
    fast = rate.retry_after(10_000)
    rate.observe(10.0, 10_000, waiting=False)
    rate.observe(5000.0, 10_000, waiting=True)
    assert rate.retry_after(10_000) == fast
    for second in range(20):
        rate.observe(5001.0 + second, 10_000 + 100 * second, waiting=True)
    assert rate.retry_after(10_000) > 5 * fast


def test_a_queue_that_stands_still() -> None:
    rate = DrainRate()
    for second in range(3):
        rate.observe(second, 0, waiting=True)
    assert rate.retry_after(10) == LONGEST_S


def test_an_engine_that_is_full_says_when_to_come_back(tmp_path: Path) -> None:
    def fill(engine: Engine) -> None:
        for name in ("a", "b"):
            engine.submit(EngineRequest(request_id=name, prompt=[5] * 20, params=SamplingParams(max_tokens=9)))
        last = EngineRequest(request_id="c", prompt=[5], params=SamplingParams())
        with pytest.raises(OverloadedError) as unmeasured:
            engine.submit(last)
        assert unmeasured.value.retry_after == UNKNOWN_S
        for second in range(3):  # as if 10 tokens a second had left the queue
            engine._drain_rate.observe(second, 10 * second, waiting=True)
        with pytest.raises(OverloadedError) as measured:
            engine.submit(last)
        assert measured.value.retry_after == 2.0

    with LLM(str(tiny_model(tmp_path)), max_queued_requests=2, max_batch_size=1) as llm:
        ask(llm, fill)
