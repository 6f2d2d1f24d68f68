"""Good clients of a storm: each asks, compares and counts, one request after the other."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from soak_requests import PATIENCE_S, Request, ask
from soak_tally import Tally

Way = Callable[[random.Random], None]
"""A way to ask for something and to count what comes; returns when that has ended."""


class Plain:
    """Requests whose client waits for the answer."""

    def __init__(self, url: str, work: Sequence[Request], expected: Sequence[dict[str, Any]], tally: Tally) -> None:
        self._url, self._work, self._expected, self._tally = url, work, expected, tally

    def __call__(self, rng: random.Random) -> None:
        """Send one of them."""
        index = rng.randrange(len(self._work))
        self._tally.begin()
        got = ask(self._url, self._work[index])
        self._tally.note(got, self._work[index], self._expected[index])
        if got.kind != "answered":
            time.sleep(0.2)


class Clients:
    """Threads that go on until the storm is over."""

    def __init__(self, ways: Sequence[Way], pause_s: float, seed: str) -> None:
        """`pause_s`: mean pause of a client between two requests."""
        self._ways, self._pause_s, self._seed = ways, pause_s, seed
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def rise(self, wanted: int) -> None:
        """Have at least so many."""
        while len(self._threads) < wanted:
            self._threads.append(threading.Thread(target=self._run, args=(len(self._threads),), daemon=True))
            self._threads[-1].start()

    def _run(self, number: int) -> None:
        rng = random.Random(f"{self._seed}/{number}")
        while not self._over.is_set():
            rng.choice(self._ways)(rng)
            self._over.wait(2 * self._pause_s * rng.random())

    def end(self) -> int:
        """Let all finish; returns how many do not."""
        self._over.set()
        deadline = time.monotonic() + 2 * PATIENCE_S
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)
