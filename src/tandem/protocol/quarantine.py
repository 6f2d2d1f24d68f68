"""Quarantine of requests that may kill the ranks or engines that work on them.

The engine counts deaths of its ranks, the api those of its engines; the record travels with a request that migrates.

All requests that were worked on when ranks or an engine died are suspects, though at most one is to blame, and most
often none is. They are replayed together once, since a machine's failure is likelier. Those under which that happens
again before they got further run alone, one after the other: the innocent pass the point of death and go on as before.

One that dies alone is not yet guilty: what kills from outside does not look who runs. So first nothing runs for a
while. If that is survived, and it then dies alone at the same place again, it is refused. If ranks die while nothing
runs, something else kills them, and nobody is a suspect any more.
"""

from __future__ import annotations

from msgspec import Struct

ALONE_AFTER = 2
"""Deaths in company, without its getting further, before it runs alone."""
REFUSE_AFTER = 2
"""Deaths alone, at the same place, before it is refused."""
ANYWHERE = 10
"""Deaths alone, without its getting further but not at the same place, before it is refused all the same."""
CLEAR = 8
"""Positions beyond the last that were planned when it died that clear a suspect."""
REST_S = 10.0
"""Seconds for which nothing runs before one that died alone does so again."""


class QuarantineRecord(Struct):
    """Deaths that a request was part of. Places are token positions, counted from the start of the prompt."""

    company: int = 0
    """Deaths in a row, in company, between which it did not get further."""
    alone: int = 0
    """Deaths in a row while it ran alone, at the same place."""
    elsewhere: int = 0
    """Deaths while it ran alone, at places that it had passed before."""
    begin: int = 0
    end: int = -1
    """Range of positions, from the field above to this one, in which it last died: from what was certainly computed to
    beyond what may have been."""

    @property
    def suspect(self) -> bool:
        """True if the request must run alone."""
        return self.company >= ALONE_AFTER or self.alone > 0

    @property
    def rests(self) -> bool:
        """True if the engine must idle before the request runs again."""
        return self.alone > 0

    @property
    def guilty(self) -> bool:
        """True if the request is to be refused."""
        return self.alone >= REFUSE_AFTER or self.alone + self.elsewhere >= ANYWHERE

    def died(self, computed: int, planned: int, *, alone: bool) -> None:
        """Count a death at which `computed` positions were done for certain, and up to `planned` possibly."""
        self.passed(computed)
        if not alone:
            self.company += 1
        elif self.alone and planned < self.begin:
            self.elsewhere += 1
            return
        else:
            self.alone += 1
        self.begin, self.end = computed, max(planned, computed) + CLEAR

    def passed(self, computed: int) -> bool:
        """True if it was a suspect and got past the position of the last death, so that the suspicion ends."""
        if computed <= self.end:
            return False
        suspect = self.suspect
        self.clear()
        return suspect

    def clear(self) -> None:
        """Forget all deaths."""
        self.company = self.alone = self.elsewhere = self.begin = 0
        self.end = -1
