"""Fair semaphore: a few pieces of work at once, shared evenly among clients, never all of them one client's."""

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


class FairSemaphore:
    """Grants the next turn to the client with the fewest, first come, first served among equals.

    Belongs to one event loop.
    """

    def __init__(self, at_once: int, most_waiting: int = 0) -> None:
        """`at_once`: pieces of work that run; one client may have all of them but one.

        `most_waiting`: pieces of a client that may wait, where that is more than `MOST_WAITING`.
        """
        self._most_waiting = most_waiting
        self._free = at_once
        self._share = max(at_once - 1, 1)
        self._running: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    @contextlib.asynccontextmanager
    async def turn(self, group: str, size: int = 0) -> AsyncIterator[None]:
        """Wait for a turn and hold it for as long as the context lasts; `size`: bytes that are kept meanwhile.

        Raises OverloadedError when too much of the client's waits already.
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
            elif self._running[group] > 1:
                self._running[group] -= 1
                self._free += 1
            else:
                del self._running[group]
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
