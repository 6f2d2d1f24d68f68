"""Child processes of the supervisor: start, health checks, restarts, and their exit codes."""

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
"""Most bytes that a child may write as the reason of its exit."""
BACKOFF_S, MAX_BACKOFF_S = 0.5, 30.0
EXIT_USAGE, EXIT_FAILED = 2, 3
"""Exit codes of a child: a user's mistake that a restart cannot fix; a failure after all retries."""
STOPPED_S = 1.0
"""Seconds that a child may be stopped (SIGSTOP) before it is replaced."""
ENDING_S = 30.0
"""Seconds that the kernel may take to end a killed process with gigabytes of memory."""
PAUSE_S = 1.0
"""Seconds between two checks from which on the supervisor itself was suspended: the gap does not count against a child."""
SERVES_S = 1.0
"""Seconds of service after which a child's earlier deaths no longer count."""


def backoff(times: int) -> float:
    """Return the seconds to wait after `times` failed starts: exponential, from `BACKOFF_S` to `MAX_BACKOFF_S`."""
    return min(BACKOFF_S * 2.0 ** min(times, 10), MAX_BACKOFF_S)


class HealthCheck:
    """Health check of one child process, active from its first answer on."""

    def __init__(self, child: ChildProcess, silent_s: float) -> None:
        """Check `child`, which must answer every `silent_s` seconds after its first answer."""
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
        """Return why the child must be replaced, or None. Call periodically.

        After a reason, return None for `ENDING_S`, while the killed process may still be ending.
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
    """A supervised child process and its successors, which can report why they exit. Used by one thread."""

    child: ChildProcess | None = None
    served: bool = False
    """True once any process has served: the settings were valid then, so a later `EXIT_USAGE` may be temporary."""
    deaths: list[float] = field(default_factory=list)
    """Monotonic times of recent deaths."""
    restart_at: float = 0.0
    serving_since: float | None = None
    """Monotonic time when the current process was first seen to serve; None before."""
    health_check: HealthCheck = field(init=False)
    _reading: int = -1
    """Read end of the pipe for the exit reason; -1 when closed."""
    _unborn: int = 0
    """Consecutive failures to start a process."""

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
        """Start a process. Return None, or (seconds until the next try, reason) if it cannot be started.

        The process must answer every `silent_s` seconds once it has answered. `changes` overrides environment variables;
        None removes one.
        """
        with ExitStack() as ours:
            try:
                self._reading, end = os.pipe()
                ours.callback(os.close, end)
                os.set_blocking(self._reading, False)  # a grandchild may keep the write end open after the child's exit
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
        """Record that the process serves; call it repeatedly."""
        self.served, now = True, time.monotonic()
        if self.serving_since is None:
            self.serving_since = now
        if now - self.serving_since >= SERVES_S:
            self.deaths.clear()

    def count_death(self, window_s: float) -> float:
        """Record a death now and forget those older than `window_s` seconds. Return the current time.monotonic()."""
        now = time.monotonic()
        self.deaths = [at for at in self.deaths if now - at < window_s] + [now]
        return now

    def ended(self) -> str:
        """Discard the ended process. Return the reason it reported, else its exit status in words."""
        assert self.child is not None
        self.child.wait(0.0)
        words = self.last_words() or self.child.describe_exit()
        self.child = None
        return words

    def last_words(self) -> str:
        """Return the exit reason that the process wrote; empty if there is none or it was read before."""
        reading, self._reading = self._reading, -1
        if reading < 0:
            return ""
        try:
            return os.read(reading, LAST_WORDS).decode(errors="replace")
        except BlockingIOError:
            return ""
        finally:
            os.close(reading)
