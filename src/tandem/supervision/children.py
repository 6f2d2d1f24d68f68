"""What the supervisor and its children agree on."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import msgspec
from msgspec import Struct

from tandem.env import child_environment
from tandem.errors import SpawnError
from tandem.processes.child import ChildProcess

MODULE = "tandem.cli.processes"
LAST_WORDS = 4096
"""Most bytes in which a child says why it ended."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
EXIT_USAGE, EXIT_FAILED = 2, 3
"""Exit codes: something is amiss that a person must mend; it has tried, and gives up."""
STOPPED_S = 1.0
"""Seconds that a child may stand still (SIGSTOP)."""
ENDING_S = 30.0
"""Seconds that the kernel may take to end a killed process, with gigabytes to give back."""
PAUSE_S = 1.0
"""A gap between two looks that is longer was the supervisor's own, and counts for nobody."""


def backoff(times: int) -> float:
    """Seconds to wait before the next start, after so many that failed: twice as long each time, within bounds."""
    return min(BACKOFF_S * 2.0 ** min(times, 10), MAX_BACKOFF_S)


class Vigil:
    """Watches one child, from its first sign of life on."""

    def __init__(self, child: ChildProcess, silent_s: float) -> None:
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


class SupervisedChild:
    """A child of the supervisor's, one process after the other, which can say why it ends. Used by one thread."""

    child: ChildProcess | None = None
    """None when there is none."""
    vigil: Vigil
    """Of the child."""
    _reading = -1
    """End of the pipe for its last words."""
    _unborn = 0
    """Times in a row that no process could be had."""

    def spawn(self, kind: str, payload: Struct, *arguments: str, name: str, silent_s: float,
              pass_fds: Sequence[int] = (), changes: Mapping[str, str | None] | None = None,
              ) -> tuple[float, str] | None:
        """Start a process, which must answer every `silent_s` seconds once it has; `changes` are variables of its
        environment. If none can be had: seconds until the next try, and why."""
        with ExitStack() as ours:
            try:
                self._reading, end = os.pipe()
                ours.callback(os.close, end)
                os.set_blocking(self._reading, False)  # another process may hold the other end after the child's end
                self.child = ChildProcess(MODULE, msgspec.json.encode(payload), env=child_environment(changes),
                                          name=name, arguments=(kind, str(end), *arguments), pass_fds=[end, *pass_fds])
            except (SpawnError, OSError) as error:
                self.last_words()
                self._unborn += 1
                return backoff(self._unborn), getattr(error, "message", str(error))
        self._unborn, self.vigil = 0, Vigil(self.child, silent_s)
        return None

    def ended(self) -> str:
        """Its process has ended: forget it. Returns why, as far as it said."""
        assert self.child is not None
        self.child.wait(0.0)
        words = self.last_words() or self.child.describe_exit()
        self.child = None
        return words

    def last_words(self) -> str:
        """Why the process that has ended did so, as far as it said; empty after the first call."""
        reading, self._reading = self._reading, -1
        if reading < 0:
            return ""
        try:
            return os.read(reading, LAST_WORDS).decode(errors="replace")
        except BlockingIOError:
            return ""
        finally:
            os.close(reading)
