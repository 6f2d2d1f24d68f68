"""Which requests may be what kills gangs, and how they are tried again without harm to the others. Pure.

When a gang dies, all requests that it worked on are suspects, though at most one is to blame. They are replayed
together once, since a machine's failure is likelier. Those under which the next gang dies too, without having got
further, run alone, one after the other: the innocent pass the point at which gangs died and go on as before, and the
one that kills dies alone and is refused.
"""

from __future__ import annotations

from collections.abc import Iterable

from tandem.scheduler.sequence import Sequence

ALONE_AFTER = 2
"""Gangs that die under a request, without its getting further, before it runs alone."""
REFUSE_AFTER = 3
"""The same, before it is refused."""
MAX_DEATHS = 10
"""Gangs that may die under a request altogether, wherever it was."""
CLEAR = 8
"""Tokens beyond the point of death that clear a suspect; more than can have been under way unseen."""


def suspect(sequence: Sequence) -> bool:
    """It must run alone."""
    return sequence.strikes >= ALONE_AFTER


def strike(sequence: Sequence) -> bool:
    """A gang died while it worked on `sequence`; True when that is to be tried no more."""
    further = sequence.produced > sequence.died_at + CLEAR
    sequence.strikes = 1 if further else sequence.strikes + 1
    sequence.died_at = sequence.produced
    sequence.deaths += 1
    return sequence.strikes >= REFUSE_AFTER or sequence.deaths >= MAX_DEATHS


def acquit(sequence: Sequence) -> bool:
    """True when a suspect has passed the point at which gangs died; it is one no more."""
    if not suspect(sequence) or sequence.produced <= sequence.died_at + CLEAR:
        return False
    sequence.strikes = 0
    return True


def may_join(sequence: Sequence, running: Iterable[Sequence]) -> bool:
    """Suspects share a batch with nobody."""
    if suspect(sequence):
        return not any(True for _ in running)
    return not any(suspect(other) for other in running)

