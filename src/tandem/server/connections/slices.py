"""Bytes that are dear to read, a slice at a time: one slice, of one connection, between all else that the loop does.

A body in chunks of a byte each costs its reader a thousand times what it costs its sender; what comes at once of it
would hold up every other connection for seconds.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

MOST_LINES = 256
"""Lines that are read at once: some milliseconds. A header may not have more."""


def slice_end(data: bytes) -> int:
    """How many of the bytes are to be read at once."""
    if data.count(b"\n") <= MOST_LINES:
        return len(data)
    end = 0
    for _ in range(MOST_LINES):
        end = data.index(b"\n", end) + 1
    return end


class Slices:
    """Connections that have more to read, by turns. Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], bool]] = deque()

    def add(self, read: Callable[[], bool]) -> None:
        """Have `read` called, between other things, until it returns False."""
        self._waiting.append(read)
        if len(self._waiting) == 1:
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        read = self._waiting[0]
        try:
            more = read()
        finally:
            self._waiting.popleft()
            if self._waiting:
                asyncio.get_running_loop().call_soon(self._turn)
        if more:
            self.add(read)
