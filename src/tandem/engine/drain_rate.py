"""How fast the queue empties, so that clients who are refused hear when to come back."""

from __future__ import annotations

INTERVAL_S = 1.0
"""Seconds between two samples."""
MEMORY = 0.8
"""Share of the old rate in the new one."""
UNKNOWN_S, LONGEST_S = 5.0, 120.0
"""What is said before anything has been measured, and the most that is said."""


class DrainRate:
    """Tokens per second that leave the queue, averaged over the last seconds in which something waited."""

    def __init__(self) -> None:
        self._rate: float | None = None
        self._sample: tuple[float, int] | None = None

    def observe(self, now: float, admitted_tokens: int, *, waiting: bool) -> None:
        """Take note at `now` seconds of all tokens that have ever left the queue. To be called often."""
        if not waiting:
            self._sample = None
        elif self._sample is None:
            self._sample = (now, admitted_tokens)
        elif (seconds := now - self._sample[0]) >= INTERVAL_S:
            rate = (admitted_tokens - self._sample[1]) / seconds
            self._rate = rate if self._rate is None else MEMORY * self._rate + (1 - MEMORY) * rate
            self._sample = (now, admitted_tokens)

    def retry_after(self, queued_tokens: int) -> float:
        """Seconds until half of the queue will be gone: room for those that come back then, and work until they do."""
        if self._rate is None:
            return UNKNOWN_S
        seconds = queued_tokens / 2 / self._rate if self._rate > 0 else LONGEST_S
        return min(max(seconds, 1.0), LONGEST_S)
