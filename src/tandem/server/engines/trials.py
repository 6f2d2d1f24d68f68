"""Requests that may be what kills engines: they are sent one at a time, so that the one to blame is found alone."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from tandem.server.engines.flight import Flight

ALONE_AFTER = 2
"""Engines lost under a request, without its getting further, before it runs alone."""
MOST_LOSSES = 3
"""The same, before it is refused."""


class Trials:
    """Who is on trial, and who waits for it."""

    def __init__(self, send: Callable[[Flight], None]) -> None:
        """`send` starts one whose turn has come."""
        self._send = send
        self._current: Flight | None = None
        self._waiting: deque[Flight] = deque()

    def must_wait(self, flight: Flight) -> bool:
        """Called before a flight is sent. True when it is a suspect and another is on trial; it is sent later."""
        if flight.strikes < ALONE_AFTER:
            return False
        if self._current not in (None, flight):
            if flight not in self._waiting:
                self._waiting.append(flight)
            return True
        self._current = flight
        return False

    def guilty(self, flight: Flight) -> bool:
        """True when enough engines were lost under it, the last of them with no other suspect in it."""
        return flight.strikes >= MOST_LOSSES

    def look(self, flight: Flight, *, over: bool = False) -> None:
        """A flight has got further, or is over: if it was on trial, the next one's turn may have come."""
        if over and flight in self._waiting:
            self._waiting.remove(flight)
        if flight is not self._current or not (over or flight.acquitted):
            return
        self._current = None
        if self._waiting:
            self._send(self._waiting.popleft())
