"""What the supervisor and its children agree on."""

from __future__ import annotations

import os

MODULE = "tandem.cli.processes"
LAST_WORDS = 4096
"""Most bytes in which a child says why it ended."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
EXIT_USAGE, EXIT_FAILED = 2, 3
"""Exit codes: something is amiss that a person must mend; it has tried, and gives up."""


def backoff(times: int) -> float:
    """Seconds to wait before the next start, after so many that failed: twice as long each time, within bounds."""
    return min(BACKOFF_S * 2.0 ** min(times, 10), MAX_BACKOFF_S)


class LastWords:
    """A pipe through which a child says why it ends."""

    def __init__(self) -> None:
        self._reading, self.end = os.pipe()
        """`end` is the child's, for the parent to close once the child has it."""
        os.set_blocking(self._reading, False)  # another process may hold the other end after the child has ended

    def read(self) -> str:
        """Return what the child that has ended said; empty after the first call."""
        reading, self._reading = self._reading, -1
        if reading < 0:
            return ""
        try:
            return os.read(reading, LAST_WORDS).decode(errors="replace")
        except BlockingIOError:
            return ""
        finally:
            os.close(reading)
