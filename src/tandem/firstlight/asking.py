"""Requests to a server under test: one answer with its times, and many at once."""

from __future__ import annotations

import asyncio
import threading
import time
from dataclasses import dataclass
from typing import Any

from tandem.bench.client import Job, Target, Timed, send
from tandem.borders import start_thread
from tandem.errors import TandemError
from tandem.firstlight.served import Server

GREEDY: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
WAIT_S = 120.0


@dataclass
class BackgroundAnswer:
    """One that comes in a thread of its own."""

    thread: threading.Thread
    found: Timed

    def under_way(self) -> bool:
        """Its first text has come, its end has not."""
        return bool(self.found.pieces) and self.thread.is_alive()

    def done(self) -> Timed:
        """Wait for it. Raises TandemError if it failed."""
        self.thread.join(WAIT_S)
        if self.thread.is_alive():
            raise TandemError(f"an answer has not come to an end within {WAIT_S:g} s")
        return whole(self.found)


def ask(server: Server, prompt: list[int], tokens: int, **body: object) -> Timed:
    """One greedy answer. Raises TandemError."""
    return whole(asyncio.run(send(_target(server, prompt, body), Job("", tokens))))


def ask_in_background(server: Server, prompt: list[int], tokens: int, **body: object) -> BackgroundAnswer:
    """The same, in a thread."""
    job = Job("", tokens)
    found = Timed(job, time.perf_counter())

    def run() -> None:
        asyncio.run(send(_target(server, prompt, body), job, found))

    return BackgroundAnswer(start_thread(run, name="asking", on_failure=lambda _: None), found)


def whole(answer: Timed) -> Timed:
    """Raises TandemError for an answer that failed."""
    if answer.error:
        raise TandemError(f"a request failed: {answer.error}")
    return answer


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Token ids that every vocabulary has, the same ones for the same arguments."""
    return [3 + (seed * 7919 + 31 * i + i * i) % 253 for i in range(length)]


def seconds(began: float) -> float:
    """Since `began`, of time.monotonic(), as reports have them."""
    return round(time.monotonic() - began, 2)


def _target(server: Server, prompt: list[int], body: dict[str, object]) -> Target:
    return Target(base_url=server.url, model="default", timeout_s=WAIT_S, body={**GREEDY, "prompt": prompt, **body})
