"""What a run has done so far, a line of JSON for each event, written through to the disk before anything else goes on.

A check that was begun and has no end died together with the run, or with the machine. The next run goes on behind it:
it tries such a check once more, but not if the machine has been restarted meanwhile, since the check may be why.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from tandem.firstlight.check import Outcome
from tandem.protocol.codec import UNREADABLE

MOST_ATTEMPTS = 2
RESTARTED = "the machine was restarted while it ran; `tandem firstlight --fresh` tries it again"
KILLED = "it was killed in the middle of it, twice; `tandem firstlight --fresh` tries it again"


class Begin(Struct, frozen=True, kw_only=True, tag="begin"):
    """A check begins."""

    name: str
    boot: str
    """Tells one start of the machine from the next."""
    at: float


class End(Struct, frozen=True, kw_only=True, tag="end"):
    """It has come to an end."""

    outcome: Outcome


class Opened(Struct, frozen=True, kw_only=True, tag="opened"):
    """What the run is about; a run with other words begins anew."""

    question: dict[str, Any]


class Again(Struct, frozen=True, kw_only=True, tag="again"):
    """What was found of these is forgotten: they are made again."""

    names: list[str]


Event = Opened | Begin | End | Again


class Journal:
    """The file of one run."""

    def __init__(self, path: Path, question: dict[str, Any], *, boot: str, fresh: bool = False) -> None:
        """Go on with the file if it is about the same `question`, else begin it. Raises OSError."""
        self._path, self._boot = path, boot
        self._begun: dict[str, list[Begin]] = {}
        self.outcomes: dict[str, Outcome] = {}
        """Of all checks that have ended, by name."""
        path.parent.mkdir(parents=True, exist_ok=True)
        events = [] if fresh else _read(path)
        self.resumed = bool(events) and isinstance(events[0], Opened) and events[0].question == question
        kept = events if self.resumed else [Opened(question=question)]
        part = path.with_suffix(".part")  # what half of a line has left is not to stand before the next one
        part.write_bytes(b"".join(msgspec.json.encode(event) + b"\n" for event in kept))
        part.replace(path)
        for event in kept[1:]:
            if isinstance(event, Begin):
                self._begun.setdefault(event.name, []).append(event)
            elif isinstance(event, End):
                self.outcomes[event.outcome.name] = event.outcome
            elif isinstance(event, Again):
                self._forget(event.names)

    def reopen(self, names: Collection[str]) -> None:
        """If all of these have ended, they are made again; else a run that was interrupted goes on."""
        if self.outcomes.keys() >= set(names):
            self.again(names)

    def again(self, names: Iterable[str]) -> None:
        """Forget what was found of these, and that they were begun."""
        event = Again(names=list(names))
        self._forget(event.names)
        self._append(event)

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self.outcomes.pop(name, None)
            self._begun.pop(name, None)

    def lost(self, name: str) -> Outcome | None:
        """The outcome of a check that shall not be tried again, since it was begun and never ended; else None."""
        begun = self._begun.get(name, [])
        if not begun or name in self.outcomes:
            return None
        detail = RESTARTED if begun[-1].boot != self._boot else KILLED if len(begun) >= MOST_ATTEMPTS else ""
        return Outcome(name=name, verdict="no answer", detail=detail, seconds=0.0,
                       attempts=len(begun)) if detail else None

    def begin(self, name: str) -> int:
        """Note that a check begins; returns which attempt it is, from 1."""
        event = Begin(name=name, boot=self._boot, at=time.time())
        self._begun.setdefault(name, []).append(event)
        self._append(event)
        return len(self._begun[name])

    def end(self, outcome: Outcome) -> None:
        """Note what came of it."""
        self.outcomes[outcome.name] = outcome
        self._append(End(outcome=outcome))

    def _append(self, event: Event) -> None:
        with self._path.open("ab") as file:
            file.write(msgspec.json.encode(event) + b"\n")
            file.flush()
            os.fsync(file.fileno())  # a panic may follow


def _read(path: Path) -> list[Event]:
    """Events up to the first line that cannot be read: a machine that went down may have left half of one."""
    events: list[Event] = []
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            events.append(msgspec.json.decode(line, type=Event))
        except UNREADABLE:
            break
    return events
