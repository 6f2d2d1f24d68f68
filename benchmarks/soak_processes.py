"""Processes of a storm's server: what they are, signals to them, and what memory and descriptors they take."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
from harness import Server

ROLES = {
    "api": "api",
    "engine": "engine",
    "encoder": "encoder",
    "tandem.executors.worker": "rank",
    "tandem.processes.sandbox_child": "worker",
}
"""Words of command lines, and what such processes are. The rest: supervisor, and what lives for moments."""


@dataclass(frozen=True)
class Size:
    """Memory and descriptors of one process at one time."""

    pid: int
    role: str
    mb: float
    descriptors: int


class Processes:
    """Supervisor of a server and all that it has started."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._roles: dict[psutil.Process, str] = {}

    def living(self) -> dict[psutil.Process, str]:
        """Processes that live now, by what they are."""
        root = psutil.Process(self._server.processes[0].pid)
        living = {}
        for one in [root, *root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                words = one.cmdline()
                living[one] = next(
                    (role for word, role in ROLES.items() if word in words), "supervisor" if one == root else "other"
                )
        self._roles.update(living)
        return living

    def hurt(self, rng: random.Random, role: str, name: str) -> str:
        """Send the signal of that name to one process of a role; returns what was done."""
        victims = sorted((one for one, is_a in self.living().items() if is_a == role), key=lambda one: one.pid)
        if not victims:
            return f"no {role}"
        with contextlib.suppress(ProcessLookupError):
            os.kill(rng.choice(victims).pid, signal.Signals[name])
        return f"{name} {role}"

    def kill_all(self) -> None:
        """Kill every process at once, and wait until all are gone."""
        for one in self.living():
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        self._server.processes.pop(0).wait()
        if orphans := self.left(30.0):
            raise RuntimeError(f"not ended by SIGKILL: {', '.join(orphans)}")

    def sizes(self) -> list[Size]:
        """Memory and descriptors of each, by role."""
        found = []
        for one, role in self.living().items():
            with contextlib.suppress(psutil.Error):
                found.append(Size(one.pid, role, one.memory_info().rss / 2**20, one.num_fds()))
        return sorted(found, key=lambda size: (size.role, size.pid))

    def left(self, seconds: float = 10.0, *, end: bool = False) -> list[str]:
        """Those that still run so long after the server has ended; with `end` they are killed."""
        deadline = time.monotonic() + seconds
        while left := [one for one in self._roles if _runs(one)]:
            if time.monotonic() > deadline:
                if end:
                    kill(left)
                return [f"{self._roles[one]} {one.pid}" for one in left]
            time.sleep(0.1)
        return []


def _runs(one: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return one.is_running() and one.status() != psutil.STATUS_ZOMBIE
    return False


def kill(processes: Sequence[psutil.Process]) -> None:
    """Kill those that still run."""
    for one in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()
