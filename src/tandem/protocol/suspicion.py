"""What speaks against a request when those that work on it die. Kept by the engine, whose gangs of ranks die, and by
the api, whose engines do; it travels along when a request goes to another engine. Pure.

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


class Suspicion(Struct):
    """Of one request. Places are positions of its tokens, the prompt's included."""

    company: int = 0
    """Deaths in a row, in company, between which it did not get further."""
    alone: int = 0
    """Deaths in a row while it ran alone, at the same place."""
    elsewhere: int = 0
    """The same at places that it had passed before."""
    begin: int = 0
    end: int = -1
    """From what was surely computed when it died last, to beyond what may have been."""

    @property
    def suspect(self) -> bool:
        """It must run alone."""
        return self.company >= ALONE_AFTER or self.alone > 0

    @property
    def rests(self) -> bool:
        """Nothing must run for a while before it does."""
        return self.alone > 0

    @property
    def guilty(self) -> bool:
        """It is to be tried no more."""
        return self.alone >= REFUSE_AFTER or self.alone + self.elsewhere >= ANYWHERE

    def died(self, computed: int, planned: int, *, alone: bool) -> None:
        """Those that worked on it died when `computed` positions were surely done, and up to `planned` perhaps."""
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
        """True if it was a suspect and has got beyond the place of the last death; it is one no more."""
        if computed <= self.end:
            return False
        suspect = self.suspect
        self.clear()
        return suspect

    def clear(self) -> None:
        """Nothing speaks against it."""
        self.company = self.alone = self.elsewhere = self.begin = 0
        self.end = -1
