"""Quarantine of requests that may crash the ranks or engines that process them.

The engine counts deaths of its ranks, the api those of its engines. The record travels with a migrating request.

All requests in process at a crash are suspects, though at most one, and often none, is the cause. They are first replayed
together, since a machine failure is more likely. Requests that crash again without progress then run alone, one after
another. A request that passes the position of the crash is cleared.

A crash while running alone is no proof either, as outside causes can kill at any time. So the engine first idles for
`REST_S`. If it survives, and the request crashes alone at the same position again, the request is refused. If ranks die while
idle, something else kills them, and all suspects are cleared.
"""

from __future__ import annotations

from msgspec import Struct

ALONE_AFTER = 2
"""Crashes with other requests, without progress in between, before the request runs alone."""
REFUSE_AFTER = 2
"""Crashes alone, at the same position, before the request is refused."""
ANYWHERE = 10
"""Crashes alone at any positions before the request is refused."""
ENCODER_DEATHS = 3
"""Ends of an encoder's process in a row with the same picture, which runs alone there, before its requests are refused."""
CLEAR = 8
"""Positions beyond the last planned one at the crash that clear a suspect."""
REST_S = 10.0
"""Idle seconds before a request that crashed alone runs again."""


class QuarantineRecord(Struct):
    """Crashes that a request was part of. Positions are counted from the start of the prompt."""

    company: int = 0
    """Consecutive crashes with other requests, without progress in between."""
    alone: int = 0
    """Consecutive crashes alone, at the same position."""
    elsewhere: int = 0
    """Crashes alone, at positions that it had passed before."""
    begin: int = 0
    end: int = -1
    """Range [begin, end] of positions of the last crash: from the certainly computed ones to beyond the planned ones."""

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
        """True if the request must be refused."""
        return self.alone >= REFUSE_AFTER or self.alone + self.elsewhere >= ANYWHERE

    def died(self, computed: int, planned: int, *, alone: bool) -> None:
        """Count a crash with `computed` positions certainly done, and up to `planned` possibly done."""
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
        """Clear the record if `computed` is past the last crash; return True if the request was a suspect."""
        if not 0 <= self.end < computed:
            return False
        suspect = self.suspect
        self.clear()
        return suspect

    def clear(self) -> None:
        """Reset all counters."""
        self.company = self.alone = self.elsewhere = self.begin = 0
        self.end = -1
