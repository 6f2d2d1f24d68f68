"""Seconds from stage to stage, from what ranks report."""

from __future__ import annotations

import pytest

from tandem.engine.report import FEWEST, KEPT_STEPS, Handoffs
from tandem.protocol.step import RankStep


def test_the_time_between_stages_is_what_their_work_leaves() -> None:
    handoffs = Handoffs({0: 0, 1: 0, 2: 1})
    for step in range(FEWEST + 3):
        assert handoffs.seconds(2) == 0.0 or step >= FEWEST
        begin = 10.0 * step
        handoffs.note(RankStep(0, step, 0.2, 0), begin + 0.2)
        handoffs.note(RankStep(1, step, 0.3, 0), begin + 0.3)
        handoffs.note(RankStep(2, step, 0.4, 0), begin + 0.3 + 0.002 + 0.4)
    assert handoffs.seconds(2) == pytest.approx(0.002)
    assert handoffs.seconds(0) == handoffs.seconds(1) == 0.0, "no stage is before theirs"


def test_steps_whose_end_never_comes_are_forgotten() -> None:
    handoffs = Handoffs({0: 0, 1: 1})
    for step in range(10 * KEPT_STEPS):
        handoffs.note(RankStep(0, step, 0.1, 0), step)
    assert len(handoffs._done) <= KEPT_STEPS
