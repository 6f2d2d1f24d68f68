"""Bounded history of server events for the operator, each with its reason and remedy."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import Struct

KEPT = 200
"""Maximum events in a history; the oldest are dropped."""
MOST_TEXT = 600
"""Maximum characters of an event's text and of its remedy."""

Level = Literal["info", "warning", "error"]


class Event(Struct, frozen=True):
    """One entry of the history."""

    number: int
    """Position in its history, from 1."""
    at: float
    """Seconds since 1970."""
    kind: str
    """Kind of event, listed in docs/apis.md: `rank_lost`, `model_loaded` and so on."""
    text: str
    """The event and its reason, in one line."""
    level: Level = "info"
    remedy: str = ""
    """Action for the operator; empty if none is needed."""
    replica: int | None = None
    rank: int | None = None
    model: str = ""
    """Served name; empty if the server has one model."""
    request_id: str = ""
    group: str = ""
    """Client of the request; only this client sees `request_id`."""
    origin: str = ""
    """Random id of the history that first recorded the event."""


class History:
    """Bounded history of events. Not thread-safe."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._origin = secrets.token_hex(8)
        self._last = 0
        self._taken: dict[str, int] = {}
        """Number of the last event copied from each other history, by `origin`."""

    def note(
        self,
        kind: str,
        text: str,
        *,
        level: Level = "info",
        remedy: str = "",
        replica: int | None = None,
        rank: int | None = None,
        model: str = "",
        request_id: str = "",
        group: str = "",
    ) -> Event:
        """Record an event at the current time and return it."""
        text, remedy = text[:MOST_TEXT], remedy[:MOST_TEXT]
        event = Event(
            self._last + 1, time.time(), kind, text, level, remedy, replica, rank, model, request_id, group, self._origin
        )
        self._add(event)
        return event

    def note_refused(self, reason: str, request_id: str, group: str) -> Event:
        """Record that a request that ranks or engines failed on is not tried again, and return the event."""
        text = f"a request is not tried again: {reason}"
        remedy = "Send it shorter or changed; if it fails alike, report it with the log."
        return self.note("request_refused", text, level="error", request_id=request_id, group=group, remedy=remedy)

    def take(self, events: Iterable[Event], *, replica: int | None = None, model: str = "") -> None:
        """Copy events not yet seen from another history. `replica` and `model`, if given, override theirs."""
        for event in events:
            if event.number <= self._taken.get(event.origin, 0):
                continue
            self._taken[event.origin] = event.number
            where = event.replica if replica is None else replica
            self._add(msgspec.structs.replace(event, number=self._last + 1, model=model or event.model, replica=where))

    def after(self, number: int = 0) -> list[Event]:
        """Return the kept events with a number above `number`, oldest first."""
        return [one for one in self._events if one.number > number]

    def _add(self, event: Event) -> None:
        self._last = event.number
        self._events.append(event)
