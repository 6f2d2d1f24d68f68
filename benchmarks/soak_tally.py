"""Counts of a storm: what became of every request, what must not be, and evidence of it."""

from __future__ import annotations

import collections
import dataclasses
import json
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from soak_requests import Outcome, Request, same
from soak_ties import tied

BAD = ("wrong", "twice", "lost", "hung")
"""Counts that must stay 0."""
KEPT = 20
"""Pieces of evidence of each kind."""
EXCUSE_S = 60.0
"""Seconds after a fault of the api or of the whole server for which connections may break: one that stands still is
noticed after some seconds."""


class Tally:
    """Counts and evidence, of any number of threads."""

    def __init__(self, evidence: Path) -> None:
        self._evidence = evidence
        self._lock = threading.Lock()
        self._excused_until = 0.0
        self.sent = 0
        self.counts: collections.Counter[str] = collections.Counter()
        """By `identical`, `tied`, `refused`, `broken` and `BAD`."""
        self.refused: collections.Counter[str] = collections.Counter()
        """Refusals by reason."""
        self.replayed = 0
        """Answers that were asked for again and came with the same bytes."""
        self.disk_tokens = 0
        """Tokens of prompts that were read from disk."""

    def excuse(self) -> None:
        """Expect broken connections from now on: the api or the server is hurt."""
        self._excused_until = time.monotonic() + EXCUSE_S

    def begin(self) -> None:
        """Count a request that is sent."""
        with self._lock:
            self.sent += 1

    def note(self, got: Outcome, request: Request, expected: Mapping[str, Any] | None) -> None:
        """Count what became of a request; `expected` is None where any answer will do."""
        kind = got.kind
        if kind == "answered":
            kind = "identical"
            if got.twice:
                kind = "twice"
            elif expected is not None and not same(got.answer, expected):
                kind = "twice" if _longer(got.answer, expected) else "wrong"
        elif kind == "failed" or (kind == "broken" and time.monotonic() > self._excused_until):
            kind = "lost"
        with self._lock:
            self.counts[kind] += 1
            self.disk_tokens += got.disk_tokens
            if kind == "refused":
                self.refused[got.detail] += 1
        if kind in BAD:
            self._keep(kind, {"request": dataclasses.asdict(request), "got": dataclasses.asdict(got), "expected": expected})

    def blame(self, kind: str, **evidence: Any) -> None:
        """Count one of `BAD` that was found otherwise."""
        with self._lock:
            self.counts[kind] += 1
        self._keep(kind, evidence)

    def settle(self, model: Path) -> None:
        """Count wrong answers anew that part from the expected ones at a tie (soak_ties.py)."""
        for file in [*self._evidence.glob("wrong-*.json"), *self._evidence.glob("twice-*.json")]:
            found = json.loads(file.read_text())
            if (
                found.get("expected")
                and not found["got"].get("twice")
                and tied(model, found["request"]["body"], found["got"]["answer"], found["expected"])
            ):
                self.counts[file.name.partition("-")[0]] -= 1
                self.counts["tied"] += 1
                file.rename(file.with_name(f"tied-{self.counts['tied']}.json"))

    def confirm(self) -> None:
        """Count an answer that came again with the same bytes."""
        with self._lock:
            self.replayed += 1

    def _keep(self, kind: str, evidence: Mapping[str, Any]) -> None:
        if self.counts[kind] <= KEPT:
            text = json.dumps({"time": time.strftime("%X"), **evidence}, indent=1, default=str)
            (self._evidence / f"{kind}-{self.counts[kind]}.json").write_text(text)


def _longer(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Whether more was said than was to be: something was said twice."""

    def size(answer: Mapping[str, Any]) -> int:
        return sum(len(value) for value in answer.values() if isinstance(value, str | list))

    return size(mine) > size(theirs)
