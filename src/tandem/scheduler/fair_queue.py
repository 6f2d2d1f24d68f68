"""Fair queueing between groups (API keys, or client addresses). Pure: no clock, no sockets.

Each group has an account: tokens of work done for it, divided by its weight. The group with the lowest account is served
next. So groups with waiting requests get work in proportion to their weights. The virtual time is the account of a group that
always got exactly its share. A new or returning group starts there. It cannot save up, nor is it penalised for using an
otherwise idle machine.
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
    """Tokens of work done for the group, divided by its weight."""
    weight: float
    live: int = 0
    """Number of live requests of the group."""


class FairQueue:
    """Accounts of all groups with live requests, or with more than their share recently."""

    def __init__(self) -> None:
        self._groups: dict[str, _Group] = {}
        self._time = 0.0
        self._weights = 0.0
        """Sum of the weights of groups with live requests."""

    def enter(self, request: EngineRequest) -> None:
        """Count a new request. Its weight becomes the weight of its group."""
        self._forget_settled()
        group = self._groups.setdefault(request.group, _Group(self._time, request.weight))
        group.weight = request.weight
        group.live += 1
        self._weigh()

    def leave(self, request: EngineRequest) -> None:
        """Uncount an ended request."""
        group = self._groups[request.group]
        group.live -= 1
        if not any(one.live for one in self._groups.values()):
            self._groups.clear()
            self._time = 0.0
        self._weigh()

    def _weigh(self) -> None:
        """Recompute the sum of live weights: a running sum would keep rounding errors."""
        self._weights = math.fsum(one.weight for one in self._groups.values() if one.live)

    def charge(self, name: str, tokens: int) -> None:
        """Charge a group with live requests with planned tokens."""
        group = self._groups[name]
        group.account += tokens / group.weight
        self._time += tokens / self._weights

    def first(self, waiting: Iterable[Sequence]) -> Sequence:
        """Return the next of the `waiting` sequences (at least one). The order within a group is kept."""
        heads: dict[str, Sequence] = {}
        for sequence in waiting:
            heads.setdefault(sequence.request.group, sequence)
        return min(heads.values(), key=lambda one: self._groups[one.request.group].account)

    def account(self, group: str) -> float:
        """Return the account of a group with live requests."""
        return self._groups[group].account

    def _forget_settled(self) -> None:
        for name in [name for name, one in self._groups.items() if not one.live and one.account <= self._time]:
            del self._groups[name]
