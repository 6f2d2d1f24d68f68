"""Semaphore shared evenly among clients; one client never holds all slots."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass

from tandem.errors import OverloadedError

MOST_WAITING = 256
"""Most waiting pieces of work per client group, unless the constructor raises it."""
MOST_WAITING_BYTES = 256 * 2**20


@dataclass(eq=False)
class _Waiting:
    group: str
    size: int
    granted: asyncio.Future[None]


class FairSemaphore:
    """Semaphore that grants the next slot to the client with the fewest running; ties are first come, first served.

    Not thread-safe: use on one event loop.
    """

    def __init__(self, at_once: int, most_waiting: int = 0) -> None:
        """`at_once`: number of slots; one client may hold all but one.

        `most_waiting`: most waiting pieces of work per client, if above `MOST_WAITING`.
        """
        self._most_waiting = most_waiting
        self._free = at_once
        self._share = max(at_once - 1, 1)
        self._running: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    @contextlib.asynccontextmanager
    async def turn(self, group: str, size: int = 0) -> AsyncIterator[None]:
        """Wait for a slot and hold it inside the context. `size`: bytes held in memory while waiting.

        Raises OverloadedError if too much work of this client waits already.
        """
        mine = [waiting.size for waiting in self._waiting if waiting.group == group]
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
            else:
                self._running -= Counter([group])
                self._free += 1
            self._grant()

    def _grant(self) -> None:
        while self._free:
            ready = [
                waiting for waiting in self._waiting if self._running[waiting.group] < self._share and not waiting.granted.done()
            ]
            if not ready:
                return
            chosen = min(ready, key=lambda waiting: self._running[waiting.group])
            self._waiting.remove(chosen)
            self._running[chosen.group] += 1
            self._free -= 1
            chosen.granted.set_result(None)
