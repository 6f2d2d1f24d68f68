"""Quarantine of requests during which ranks died: each runs alone until cleared or refused (protocol/quarantine.py). Pure."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from tandem.protocol.control import QuarantineNotice, Refused
from tandem.protocol.quarantine import REST_S
from tandem.protocol.step import StepPlan
from tandem.scheduler.sequence import Sequence

log = logging.getLogger(__name__)


class Quarantine:
    """Rules for when suspects may run, and notices for their apis. Each sequence has a `QuarantineRecord`."""

    def __init__(self) -> None:
        self._resting: tuple[Sequence, float] | None = None
        """Suspect for which the ranks idle, and the end of the idle time in seconds."""

    def accuse(self, sequences: Mapping[str, Sequence], under_way: Iterable[StepPlan]) -> None:
        """Record a death of the ranks for all sequences that were in process."""
        names = {name for plan in under_way for name in (*plan.decode, *(op.request_id for op in plan.prefill))}
        working = [s for name, s in sequences.items() if s.awaits_grammar or s.encoding or (name in names and not s.finished)]
        alone = [sequence for sequence in working if sequence.quarantine_record.suspect]
        for sequence in alone or working:
            sequence.deaths += 1
            sequence.quarantine_record.died(sequence.reached, max(sequence.computed, sequence.reached), alone=bool(alone))

    def restart(self, sequence: Sequence) -> Refused | None:
        """Reset a sequence for new ranks. Return its refusal if it caused the deaths, else None."""
        sequence.rested = sequence.announced = sequence.noted = False
        self._resting = None
        if not sequence.quarantine_record.guilty or sequence.finished:
            return None
        return Refused(
            sequence.request_id,
            500,
            f"the ranks died {sequence.deaths} times while they worked on this "
            "request, the last times while it ran alone; it is not tried again",
            code="rank_failure",
        )

    @staticmethod
    def may_join(sequence: Sequence, members: Iterable[Sequence]) -> bool:
        """Return True if a sequence may run beside `members`. A suspect runs alone, after the steps in `watch`."""
        if sequence.quarantine_record.suspect:
            return next(iter(members), None) is None and sequence.may_be_tried and sequence.expected
        return not any(other.quarantine_record.suspect for other in members)

    def watch(self, suspect: Sequence | None, now: float) -> list[QuarantineNotice]:
        """Prepare the next suspect: idle the ranks if it died alone before. Return the notices for its api.

        If ranks die while idle, the suspect is not the cause. A suspect runs only after its api acknowledged the notice, so a
        crash of the engine is attributed correctly.
        """
        trials: list[QuarantineNotice] = []
        resting = None if suspect is None or suspect.may_be_tried else suspect
        if resting is None or self._resting is None or self._resting[0] is not resting:
            self._resting = None if resting is None else (resting, now + REST_S)
            if resting is not None:
                log.warning(
                    "Running nothing for %.0f s: ranks may die without request %s too, which ran alone when they died",
                    REST_S,
                    resting.request_id,
                )
                trials += self._trial(resting, resting=True)
        elif now >= self._resting[1]:
            resting.rested = True
        if suspect is not None and suspect.may_be_tried and not (suspect.expected or suspect.announced):
            suspect.announced = True
            trials += self._trial(suspect, resting=False)
        return trials

    @staticmethod
    def _trial(sequence: Sequence, *, resting: bool) -> list[QuarantineNotice]:
        """Return the notice for the sequence's api; empty if its request has no quarantine record."""
        return [] if sequence.request.quarantine_record is None else [QuarantineNotice(sequence.request_id, resting)]
