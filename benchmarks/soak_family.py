"""The processes of the soak's server: hurting them, and what memory and files they take."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import psutil
from harness import Server

ROLES = {"api": "api", "engine": "engine", "tandem.executors.worker": "rank", "tandem.server.workers.child": "worker"}
"""Words of command lines, and what such processes are. The rest: supervisor, and what lives for moments."""
SETTLED_S = 60.0
"""A process is looked at from this age on."""
GROWTH, GROWTH_MB = 1.25, 32.0
"""A process may grow by this factor or so much, whichever is more."""
WORKER_MB = 4096.0
"""Most memory of a worker process, which reads large bodies and ends when it has kept much."""
GROWTH_FILES = 16
"""Besides one for each client that has come since."""


@dataclass
class Size:
    """What one process took over its life."""

    pid: int
    role: str
    seconds: float = 0.0
    mb_first: float = 0.0
    mb_last: float = 0.0
    mb_most: float = 0.0
    files_first: int = 0
    files_last: int = 0
    judged: bool = False
    grown: bool = False


class Family:
    """The server's processes."""

    def __init__(self, server: Server, clients: int, judged_s: float) -> None:
        """`judged_s`: how long a process must have been looked at to be judged. An api is at its usual size only when
        it has had bodies of all sizes, which takes minutes on a busy machine."""
        self._judged_s = judged_s
        self._root = psutil.Process(server.processes[0].pid)
        self._files_more = GROWTH_FILES + clients
        self._roles: dict[psutil.Process, str] = {}
        self._sizes: dict[psutil.Process, list[tuple[float, float, int]]] = {}

    def _all(self) -> dict[psutil.Process, str]:
        """All that live now, by what they are."""
        living = {}
        for one in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                words = one.cmdline()
                living[one] = next((role for word, role in ROLES.items() if word in words),
                                   "supervisor" if one == self._root else "other")
        self._roles.update(living)
        return living

    def hurt(self, rng: random.Random, roles: list[str], warned: Mapping[str, Callable[[], None]]) -> str:
        """Kill or stop one process; returns what was done. Who is `warned`, by role, is so before it is done."""
        role = rng.choice(roles)
        victims = [one for one, is_a in self._all().items() if is_a == role]
        if not victims:
            return f"no {role}"
        victim, sig = rng.choice(victims), rng.choice([signal.SIGKILL, signal.SIGSTOP])
        if role in warned:
            warned[role]()
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, sig)
        return f"{sig.name} {role}"

    def sample(self) -> None:
        """Note memory and open files of every process that has settled."""
        for one in self._all():
            with contextlib.suppress(psutil.Error):
                size = one.memory_info().rss / 2**20
                age = time.time() - one.create_time()
                if size and age > SETTLED_S:  # one that has just died has none
                    self._sizes.setdefault(one, []).append((time.monotonic(), size, one.num_fds()))

    def sizes(self) -> list[Size]:
        """What each process took, those that lived longest first."""
        rows = []
        for one, samples in self._sizes.items():
            row = Size(one.pid, self._roles[one], samples[-1][0] - samples[0][0])
            few = max(1, len(samples) // 10)
            first, last = samples[:few], samples[-few:]
            row.mb_first, row.mb_last = max(size for _, size, _ in first), min(size for _, size, _ in last)
            row.mb_most = max(size for _, size, _ in samples)
            row.files_first, row.files_last = max(files for *_, files in first), min(files for *_, files in last)
            row.judged = row.seconds >= self._judged_s and row.role != "other"
            much = row.mb_last > max(row.mb_first * GROWTH, row.mb_first + GROWTH_MB)
            if row.role == "worker":
                much = row.mb_most > WORKER_MB
            row.grown = row.judged and (much or row.files_last > row.files_first + self._files_more)
            rows.append(row)
        return sorted(rows, key=lambda row: -row.seconds)

    def left(self, seconds: float = 10.0) -> list[str]:
        """Those that still run so long after the server has ended."""
        deadline = time.monotonic() + seconds
        while left := [one for one in self._roles if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
            if time.monotonic() > deadline:
                return [f"{self._roles[one]} {one.pid}" for one in left]
            time.sleep(0.2)
        return []
