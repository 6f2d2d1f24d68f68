"""When clients who are refused hear that they should come back."""

from __future__ import annotations

import pytest

from tandem.engine.drain_rate import LONGEST_S, UNKNOWN_S, DrainRate


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
