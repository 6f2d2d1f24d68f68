"""Child processes of the supervisor: how they are started, watched and restarted, and what they agree on with it."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import msgspec
from msgspec import Struct

from tandem.env import child_environment
from tandem.errors import SpawnError
from tandem.processes.child import ChildProcess

MODULE = "tandem.cli.processes"
LAST_WORDS = 4096
"""Most bytes that a child may write as its reason to end."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
EXIT_USAGE, EXIT_FAILED = 2, 3
"""Exit codes: a mistake that a person must mend; a failure after all tries."""
STOPPED_S = 1.0
"""Seconds that a child may be stopped (SIGSTOP)."""
ENDING_S = 30.0
"""Seconds that the kernel may take to end a killed process that has gigabytes of memory."""
PAUSE_S = 1.0
"""Gap in seconds between two checks that counts as the supervisor's own pause, not as a child's."""
SERVES_S = 1.0
"""Seconds of service after which a child's earlier deaths are forgotten."""


def backoff(times: int) -> float:
    """Return the seconds to wait after `times` failed starts: doubled each time, within bounds."""
    return min(BACKOFF_S * 2.0 ** min(times, 10), MAX_BACKOFF_S)


class HealthCheck:
    """Health check of one child, from its first sign of life on."""

    def __init__(self, child: ChildProcess, silent_s: float) -> None:
        """Watch a child that, once it has answered, must do so every `silent_s` seconds."""
        self._child = child
        self._silent_s = silent_s
        self._looked_at = time.monotonic()
        self._heard_at = math.inf
        self._stopped_at = math.inf
        self._silent_until = -math.inf

    def heard(self) -> None:
        """Record that the child has answered."""
        self._heard_at = time.monotonic()

    def verdict(self) -> str | None:
        """Return why the child must be replaced, once; None while it need not be.

        Also None for the `ENDING_S` in which a process that was killed may still be there. Call it again and again.
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


@dataclass(eq=False, kw_only=True)
class SupervisedChild:
    """A child of the supervisor, one process after the other, which can tell why it ends. Used by one thread."""

    child: ChildProcess | None = None
    served: bool = False
    """A process has served: what a later one finds amiss was in order before, and may come back."""
    deaths: list[float] = field(default_factory=list)
    """Times of the latest deaths."""
    restart_at: float = 0.0
    serving_since: float | None = None
    """When the process was first seen to serve; None before that."""
    health_check: HealthCheck = field(init=False)
    _reading: int = -1
    """End of the pipe for its last words."""
    _unborn: int = 0
    """Times in a row that no process could be started."""

    def spawn(
        self,
        kind: str,
        payload: Struct,
        *arguments: str,
        name: str,
        silent_s: float,
        pass_fds: Sequence[int] = (),
        changes: Mapping[str, str | None] | None = None,
    ) -> tuple[float, str] | None:
        """Start a process, which must answer every `silent_s` seconds once it has; `changes` are variables of its
        environment. Return None, or seconds until the next try and why there is no process."""
        with ExitStack() as ours:
            try:
                self._reading, end = os.pipe()
                ours.callback(os.close, end)
                os.set_blocking(self._reading, False)  # another process may hold the other end after the child's end
                self.child = ChildProcess(
                    MODULE,
                    msgspec.json.encode(payload),
                    env=child_environment(changes),
                    name=name,
                    arguments=(kind, str(end), *arguments),
                    pass_fds=[end, *pass_fds],
                )
            except (SpawnError, OSError) as error:
                self.last_words()
                self._unborn += 1
                return backoff(self._unborn), getattr(error, "message", str(error))
        self._unborn, self.serving_since, self.health_check = 0, None, HealthCheck(self.child, silent_s)
        return None

    def serves(self) -> None:
        """Record that the process serves now."""
        self.served, now = True, time.monotonic()
        if self.serving_since is None:
            self.serving_since = now
        if now - self.serving_since >= SERVES_S:
            self.deaths.clear()

    def count_death(self, window_s: float) -> float:
        """Record a death, and forget those before the last `window_s` seconds. Returns the time."""
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < window_s] + [now]
        return now

    def ended(self) -> str:
        """Forget the process, which has ended. Returns why it did."""
        assert self.child is not None
        self.child.wait(0.0)
        words = self.last_words() or self.child.describe_exit()
        self.child = None
        return words

    def last_words(self) -> str:
        """Return why the process has ended, as far as it said; empty after the first call."""
        reading, self._reading = self._reading, -1
        if reading < 0:
            return ""
        try:
            return os.read(reading, LAST_WORDS).decode(errors="replace")
        except BlockingIOError:
            return ""
        finally:
            os.close(reading)
