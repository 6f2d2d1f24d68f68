"""Open and idle connections by client group, to close the longest idle one when a limit is reached. Pure."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable


class ConnectionSlots:
    """Open connections of one listening socket."""

    def __init__(self) -> None:
        self.open: Counter[str | None] = Counter()
        """Number of connections by group; None: the total."""
        self.idle: defaultdict[str | None, dict[ConnectionSlot, float]] = defaultdict(dict)
        """Idle connections by group (None: all), with `time.monotonic()` of their last activity, longest idle first."""

    def make_room(self, group: str | None = None, *, before: float = math.inf) -> bool:
        """Close the longest idle connection of a group (None: of all); return False if none was idle before `before`."""
        slot, since = next(iter(self.idle[group].items()), (None, math.inf))
        if slot is None or since >= before:
            return False
        slot.close()
        slot.leave()
        return True


class ConnectionSlot:
    """Entry of one connection in `ConnectionSlots`, from its TLS handshake on; idle until it has a request."""

    def __init__(self, slots: ConnectionSlots, group: str) -> None:
        self.close: Callable[[], object] = lambda: None
        """Function that closes the connection or cancels its handshake."""
        self._slots = slots
        self._keys: tuple[str | None, ...] = (None, group)
        for key in self._keys:
            slots.open[key] += 1
        self.rest()

    def rest(self) -> None:
        """Mark the connection as idle."""
        self.work()
        for key in self._keys:
            self._slots.idle[key][self] = time.monotonic()

    def work(self) -> None:
        """Mark the connection as busy."""
        for key in self._keys:
            self._slots.idle[key].pop(self, None)

    def leave(self) -> None:
        """Release the slot. Idempotent."""
        self.work()
        for key in self._keys:
            self._slots.open[key] -= 1
            if not self._slots.open[key]:
                del self._slots.open[key], self._slots.idle[key]
        self._keys = ()
