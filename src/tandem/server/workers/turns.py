"""Whose work comes next: a few pieces at once, shared evenly among clients, and never all of them one client's."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tandem.errors import OverloadedError

MOST_WAITING = 256
"""Pieces of work of one client that may wait."""
MOST_WAITING_BYTES = 256 * 2**20


@dataclass(eq=False)
class _Waiting:
    group: str
    size: int
    granted: asyncio.Future[None]


class Turns:
    """Fair semaphore: the next turn goes to the client with the fewest, first come, first served among equals.

    Belongs to one event loop.
    """

    def __init__(self, at_once: int, most_waiting: int = 0) -> None:
        """`at_once` pieces of work run; one client may have all of them but one.

        `most_waiting` of its pieces may wait, where that is more than `MOST_WAITING`.
        """
        self._most_waiting = most_waiting
        self._free = at_once
        self._share = max(at_once - 1, 1)
        self._running: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    @contextlib.asynccontextmanager
    async def turn(self, group: str, size: int = 0) -> AsyncIterator[None]:
        """Wait for a turn, and have it for as long as the context lasts; `size` are the bytes that are kept meanwhile.

        Raises OverloadedError when too much of the client's waits already.
        """
        mine = [one.size for one in self._waiting if one.group == group]
        if len(mine) >= max(MOST_WAITING, self._most_waiting) or (mine and sum(mine) + size > MOST_WAITING_BYTES):
            raise OverloadedError(f"{len(mine)} large requests of yours wait to be read; try again shortly.")
        waiting = _Waiting(group, size, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._grant()
        try:
            await waiting.granted
            yield
        finally:
            if waiting in self._waiting:
                self._waiting.remove(waiting)
            elif self._running[group] > 1:
                self._running[group] -= 1
                self._free += 1
            else:
                del self._running[group]
                self._free += 1
            self._grant()

    def _grant(self) -> None:
        while self._free:
            ready = [one for one in self._waiting
                     if self._running[one.group] < self._share and not one.granted.done()]
            if not ready:
                return
            one = min(ready, key=lambda one: self._running[one.group])
            self._waiting.remove(one)
            self._running[one.group] += 1
            self._free -= 1
            one.granted.set_result(None)
