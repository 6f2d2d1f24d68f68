"""A rank host that has joined, and the rank that it runs, as the head knows them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from tandem.protocol.hosts import HostFacts, Join, MlxWorld


class RemoteRank:
    """A rank process on another machine, as far as its rank host has told."""

    def __init__(self, number: int, member: Member, kill: Callable[[], None], changed: threading.Condition) -> None:
        self.number = number
        self.pid = 0
        self.stopped = False
        self._member = member
        self._kill = kill
        self._changed = changed
        self._code: int | None = None
        self._how = ""

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        return self._code

    def describe_exit(self) -> str:
        """How it ended, in words."""
        where = self._member.facts.name
        return f"on {where} {self._how}" if self._code is not None else f"is running on {where}"

    def ended(self, code: int, how: str) -> None:
        """For the roster: it has ended."""
        with self._changed:
            if self._code is None:
                self._code, self._how = code, how
            self._changed.notify_all()

    def kill(self) -> None:
        """Have its host end it."""
        if self._code is None:
            self._kill()

    def wait(self, timeout_s: float) -> bool:
        """Wait for its end; False when `timeout_s` seconds pass first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._code is not None, timeout_s)


@dataclass(eq=False)
class Member:
    """A rank host that has joined."""

    identity: bytes
    join: Join
    slot: int | None
    """Rank that it is for; None while it is spare."""
    heard: float
    rank: RemoteRank | None = None

    @property
    def facts(self) -> HostFacts:
        """Of its machine."""
        return self.join.facts

    @property
    def mlx(self) -> MlxWorld:
        """What mlx.launch told it."""
        return self.join.mlx
