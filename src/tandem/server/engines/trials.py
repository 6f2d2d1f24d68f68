"""Requests that may be what kills engines: they are sent one at a time, and judged by what engines say of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from tandem.server.engines.flight import Flight


class Trials:
    """Who is on trial, and who waits for it."""

    def __init__(self, send: Callable[[Flight], None]) -> None:
        """`send` starts one whose turn has come."""
        self._send = send
        self._current: Flight | None = None
        self._waiting: deque[Flight] = deque()

    def must_wait(self, flight: Flight) -> bool:
        """Called before a flight is sent. True when it is a suspect and another is on trial; it is sent later."""
        if not flight.suspicion.suspect:
            return False
        if self._current not in (None, flight):
            if flight not in self._waiting:
                self._waiting.append(flight)
            return True
        self._current = flight
        return False

    def judge(self, replica: int, flights: Collection[Flight]) -> None:
        """A replica has died: who of all `flights` may have done it?"""
        here = [flight for flight in flights if flight.replica == replica]
        for flight in here:
            flight.judged = flight.wire_id
        tried = [flight for flight in here if flight.trial is not None]
        if any(flight.trial is False for flight in tried):
            # It died while nothing ran there: something else kills engines.
            for flight in flights:
                flight.suspicion.clear()
            self._current = None
        for flight in tried or here:
            if flight.trial is not False:
                flight.blame(alone=flight.trial is True)
        self._call_next()

    def look(self, flight: Flight, *, over: bool = False) -> None:
        """A flight has got further, or is over: if it was on trial, the next one's turn may have come."""
        if over and flight in self._waiting:
            self._waiting.remove(flight)
        if flight.suspicion.passed(flight.computed):
            flight.trial = None
        if flight is not self._current or (flight.suspicion.suspect and not over):
            return
        self._current = None
        self._call_next()

    def _call_next(self) -> None:
        """Send those that wait, as long as nobody is on trial; one that is no suspect any more need not wait."""
        while self._waiting and self._current is None:
            self._send(self._waiting.popleft())
