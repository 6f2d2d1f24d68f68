"""What happened to a server, for people: a bounded list of events, each with its reason and what to do."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import Struct

KEPT = 200
"""Events that a server keeps; the oldest go first."""
MOST_TEXT = 600
"""Characters of an event's text."""

Level = Literal["info", "warning", "error"]


class Event(Struct, frozen=True):
    """One thing that happened."""

    number: int
    """Counts up, from 1, in the history that has it."""
    at: float
    """Seconds since 1970."""
    kind: str
    """As docs/apis.md lists them: `rank_lost`, `model_loaded` and so on."""
    text: str
    """What happened and why, in a line."""
    level: Level = "info"
    remedy: str = ""
    """What a person can do; empty where nothing is needed."""
    replica: int | None = None
    rank: int | None = None
    model: str = ""
    """Of several."""
    request_id: str = ""
    group: str = ""
    """Whose request it was: only they are told its id."""
    origin: str = ""
    """The history that it was noted in first."""


class History:
    """The latest events. Used by one thread."""

    def __init__(self, kept: int = KEPT) -> None:
        self._events: deque[Event] = deque(maxlen=kept)
        self._origin = secrets.token_hex(8)
        self._last = 0
        self._taken: dict[str, int] = {}
        """The last number that was taken from each other history."""

    def note(self, kind: str, text: str, *, level: Level = "info", remedy: str = "", replica: int | None = None,
             rank: int | None = None, model: str = "", request_id: str = "", group: str = "") -> Event:
        """Something happens now."""
        event = Event(self._last + 1, time.time(), kind, text[:MOST_TEXT], level, remedy[:MOST_TEXT], replica, rank,
                      model, request_id, group, self._origin)
        self._add(event)
        return event

    def take(self, events: Iterable[Event], *, replica: int | None = None, model: str = "") -> None:
        """Take over what is new of another history's events, which are of this replica and model."""
        for event in events:
            if event.number <= self._taken.get(event.origin, 0):
                continue
            self._taken[event.origin] = event.number
            self._add(msgspec.structs.replace(event, number=self._last + 1, model=model or event.model,
                                              replica=event.replica if replica is None else replica))

    def after(self, number: int = 0) -> list[Event]:
        """Those that are kept and have a higher number, the oldest first."""
        return [one for one in self._events if one.number > number]

    def _add(self, event: Event) -> None:
        self._last = event.number
        self._events.append(event)
