"""How long arrays take from stage to stage, seen from the engine: no two machines' clocks are compared. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

from tandem.protocol.step import RankStep

KEPT_STEPS = 64
"""Steps that the median is of, and that may be under way at once."""
FEWEST = 4
"""Steps before which nothing is said."""


class Handoffs:
    """Of one gang. A rank's report comes when its output is done, and says how long its input had been there by then;
    the time between the output of one stage and the input of the next is the difference. Reports come over the control
    sockets, so what is told holds to a fraction of a millisecond."""

    def __init__(self, stages: Mapping[int, int]) -> None:
        """`stages`: the stage of each rank."""
        self._stages = stages
        self._done: dict[int, dict[int, float]] = {}
        """When the last rank of a stage had done a step, by step and stage."""
        self._seconds: dict[int, deque[float]] = {}

    def note(self, step: RankStep, now: float) -> None:
        """A rank has reported at `now`, in seconds of any clock."""
        stage = self._stages.get(step.rank, 0)
        steps = self._done.setdefault(step.step_id, {})
        steps[stage] = max(now, steps.get(stage, now))
        if (before := steps.get(stage - 1)) is not None:
            seconds = now - step.busy_s - before
            self._seconds.setdefault(step.rank, deque(maxlen=KEPT_STEPS)).append(max(seconds, 0.0))
        while len(self._done) > KEPT_STEPS:
            del self._done[next(iter(self._done))]

    def seconds(self, rank: int) -> float:
        """Median from the stage before to this rank; 0 where there is none, or too little was seen."""
        found = self._seconds.get(rank, ())
        return median(found) if len(found) >= FEWEST else 0.0
