"""Does a child process of the supervisor run, and does it answer?"""

from __future__ import annotations

import math
import time
from typing import Protocol

STOPPED_S = 1.0
"""Seconds that a child may stand still (SIGSTOP)."""
ENDING_S = 30.0
"""Seconds that the kernel may take to end a killed process, with gigabytes to give back."""
PAUSE_S = 1.0
"""A gap between two looks that is longer was the supervisor's own, and counts for nobody."""


class Child(Protocol):
    """What is watched."""

    @property
    def stopped(self) -> bool:
        """It lives but stands still."""


class Vigil:
    """Watches one child, from its first sign of life on."""

    def __init__(self, child: Child, silent_s: float) -> None:
        """A child that has answered once must do so every `silent_s` seconds."""
        self._child = child
        self._silent_s = silent_s
        self._looked_at = time.monotonic()
        self._heard_at = math.inf
        self._stopped_at = math.inf
        self._silent_until = -math.inf

    def heard(self) -> None:
        """It has answered."""
        self._heard_at = time.monotonic()

    def verdict(self) -> str | None:
        """Why it must be replaced, in words, said once; None while it need not be, and for the `ENDING_S` in which a
        process that was killed may still be there. To be asked again and again.
        """
        now = time.monotonic()
        if now < self._silent_until:
            return None
        words = self._trouble(now)
        if words is not None:
            self._silent_until = now + ENDING_S
        return words

    def _trouble(self, now: float) -> str | None:
        gap, self._looked_at = now - self._looked_at, now
        if gap > PAUSE_S:
            self._heard_at += gap
            self._stopped_at += gap
        if not self._child.stopped:
            self._stopped_at = math.inf
        elif self._stopped_at == math.inf:
            self._stopped_at = now
        elif now - self._stopped_at > STOPPED_S:
            return "stands still: its process is stopped (SIGSTOP, or a debugger)"
        if now - self._heard_at > self._silent_s:
            return f"has not answered for {now - self._heard_at:.0f} s"
        return None
