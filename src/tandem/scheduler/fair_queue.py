"""Fair shares of the work between groups (API keys, or client addresses). Pure: no clock, no sockets.

Each group has an account of the tokens of work done for it, divided by its weight. The waiting request of the group
with the lowest account is next, so groups that always have something waiting get work in proportion to their weights.
The virtual time is the account of a group that had got exactly its share all along. A group that comes (back) starts
there: it cannot save up, nor is anybody held back for having used a machine that nobody else wanted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from tandem.protocol.request import EngineRequest
from tandem.scheduler.sequence import Sequence


@dataclass
class _Group:
    account: float
    """Tokens of work done for it, over its weight."""
    weight: float
    live: int = 0
    """Live requests of the group."""


class FairQueue:
    """The accounts of all groups that have live requests, or have lately had more than their share."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._time = 0.0
        self._weights = 0.0
        """Sum over the groups that have live requests."""

    def enter(self, request: EngineRequest) -> None:
        """Count a new request. Its weight is that of its group from now on."""
        self._forget_settled()
        group = self._groups.setdefault(request.group, _Group(self._time, request.weight))
        group.weight = request.weight
        group.live += 1
        self._weigh()

    def leave(self, request: EngineRequest) -> None:
        """Subtract an ended request."""
        group = self._groups[request.group]
        group.live -= 1
        if not any(one.live for one in self._groups.values()):
            self._groups.clear()
            self._time = 0.0
        self._weigh()

    def _weigh(self) -> None:
        """Recompute the sum of live weights: a running sum would keep rounding errors."""
        self._weights = math.fsum(one.weight for one in self._groups.values() if one.live)

    def charge(self, request: EngineRequest, tokens: int) -> None:
        """Charge a live request with planned work."""
        group = self._groups[request.group]
        group.account += tokens / group.weight
        self._time += tokens / self._weights

    def first(self, waiting: Iterable[Sequence]) -> Sequence:
        """Which of the waiting sequences, at least one, is next: within a group the order stays as it is."""
        heads: dict[str, Sequence] = {}
        for sequence in waiting:
            heads.setdefault(sequence.request.group, sequence)
        return min(heads.values(), key=lambda one: self._groups[one.request.group].account)

    def account(self, group: str) -> float:
        """The account of a group that has live requests."""
        return self._groups[group].account

    def _forget_settled(self) -> None:
        for name in [name for name, one in self._groups.items() if not one.live and one.account <= self._time]:
            del self._groups[name]
