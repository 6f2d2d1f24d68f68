"""The good clients of the soak: they ask, compare, count, and keep what is not as it should be."""

from __future__ import annotations

import collections
import dataclasses
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

from soak_requests import PATIENCE_S, Outcome, Request, ask, same

KEPT = 20
"""Pieces of evidence of each kind."""
EXCUSE_S = 60.0
"""For so long after an api was hurt connections may break: one that stands still is noticed after some seconds."""


class Clients:
    """So many clients as were last wanted, each with one request after the other, until `over`."""

    def __init__(self, url: str, work: list[Request], expected: list[dict[str, Any]], evidence: Path) -> None:
        self._url, self._work, self._expected, self._evidence = url, work, expected, evidence
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._excused_until = 0.0
        self.over = False
        self.sent = 0
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.bad: collections.Counter[str] = collections.Counter()
        """What must not be: wrong, twice, failed, hung, broken (with no api hurt)."""
        self.disk_tokens = 0
        """Of prompts, read from disk."""

    def rise(self, wanted: int) -> None:
        """From now on at least so many."""
        while len(self._threads) < wanted:
            self._threads.append(threading.Thread(target=self._run, args=(len(self._threads),), daemon=True))
            self._threads[-1].start()

    def excuse(self) -> None:
        """An api is hurt now: its connections break."""
        self._excused_until = time.monotonic() + EXCUSE_S

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self.over:
            index = rng.randrange(len(self._work))
            with self._lock:
                self.sent += 1
            began = time.time()
            got = ask(self._url, self._work[index])
            with self._lock:
                self._note(got, index, began)
            if got.kind != "answered":
                time.sleep(0.2)

    def _note(self, got: Outcome, index: int, began: float) -> None:
        self.outcomes[got.kind] += 1
        self.disk_tokens += got.disk_tokens
        if got.kind != "answered":
            self.reasons[f"{got.kind}: {got.detail}"] += 1
        expected, wrong = self._expected[index], ""
        if got.kind == "answered" and not same(got.answer, expected):
            wrong = "twice" if _longer(got.answer, expected) else "wrong"
        elif got.kind in ("failed", "hung") or (got.kind == "broken" and time.monotonic() > self._excused_until):
            wrong = got.kind
        if wrong:
            self.bad[wrong] += 1
        if wrong and self.bad[wrong] <= KEPT:
            found = {"began": began, "ended": time.time(), "request": dataclasses.asdict(self._work[index]),
                     "got": dataclasses.asdict(got), "expected": expected}
            (self._evidence / f"{wrong}-{self.bad[wrong]}.json").write_text(json.dumps(found, indent=1))

    def end(self) -> bool:
        """Let all finish; False if one does not."""
        self.over = True
        deadline = time.monotonic() + 2 * PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)


def _longer(mine: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """More than was to be said: something was said twice."""
    def size(answer: dict[str, Any]) -> int:
        return sum(len(value) for value in answer.values() if isinstance(value, str | list))

    return size(mine) > size(theirs)
