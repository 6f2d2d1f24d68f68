"""Connections by address: how many are open, and which of them are idle, so that one can make room. Pure."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable


class ConnectionSlots:
    """Open connections of one listening socket."""

    def __init__(self) -> None:
        self.open: Counter[str | None] = Counter()
        """Connections by group; in all at None."""
        self.idle: defaultdict[str | None, dict[ConnectionSlot, float]] = defaultdict(dict)
        """ConnectionSlots without a request by group, with the time since when; the first has been idle for longest."""

    def make_room(self, group: str | None = None, *, before: float = math.inf) -> bool:
        """Close the connection of a group, or of all, that is idle for longest; False if none is since `before`."""
        slot, since = next(iter(self.idle[group].items()), (None, math.inf))
        if slot is None or since >= before:
            return False
        slot.close()
        slot.leave()
        return True


class ConnectionSlot:
    """One connection among the others, from its TLS handshake on; idle until it has a request."""

    def __init__(self, slots: ConnectionSlots, group: str) -> None:
        self.close: Callable[[], object] = lambda: None
        """End the connection or its handshake."""
        self._slots = slots
        self._keys: tuple[str | None, ...] = (None, group)
        for key in self._keys:
            slots.open[key] += 1
        self.rest()

    def rest(self) -> None:
        """Note that an answer is out: nothing is lost when the connection is closed."""
        self.work()
        for key in self._keys:
            self._slots.idle[key][self] = time.monotonic()

    def work(self) -> None:
        """Note that a request is being worked on."""
        for key in self._keys:
            self._slots.idle[key].pop(self, None)

    def leave(self) -> None:
        """Release the slot. Safe to call again."""
        self.work()
        for key in self._keys:
            self._slots.open[key] -= 1
            if not self._slots.open[key]:
                del self._slots.open[key], self._slots.idle[key]
        self._keys = ()
