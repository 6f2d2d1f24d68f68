"""Requests for the engine of an `LLM` as they are, and looks at that engine from the thread that works with it."""

from __future__ import annotations

import os
import queue
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from scheduler_invariants import check_invariants
from tandem import LLM
from tandem.engine.engine import Engine
from tandem.engine.thread import Event
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest

T = TypeVar("T")


def submitted(llm: LLM, requests: Sequence[EngineRequest], seen: Callable[[Event], object] = lambda _: None) -> Iterator[Output]:
    """What comes of them, until all have ended; raises what goes wrong with one.

    `seen` is told first, in the engine's thread: nothing more is computed before it returns, but for what ranks have
    been told to.
    """
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def take(event: Event) -> None:
        seen(event)
        events.put(event)

    llm._session.engine.submit(requests, take).result()
    live = {request.request_id for request in requests}
    while live:
        event = events.get(timeout=240)
        if isinstance(event, Exception):
            raise event
        if event.finish_reason:
            live.remove(event.request_id)
        yield event


class Killer:
    """For `submitted`: kills the last rank when `due` says so, before anything more can come of the others."""

    def __init__(self, llm: LLM, due: Callable[[Output], bool] = lambda _: True) -> None:
        """`due` is asked with each output, until the rank is dead."""
        self.killed = False
        self._llm, self._due = llm, due

    def __call__(self, event: Event) -> None:
        if not self.killed and isinstance(event, Output) and self._due(event):
            os.kill(self._llm.engine.executor.pids[-1], signal.SIGKILL)
            self.killed = True


def ask(llm: LLM, work: Callable[[Engine], T]) -> T:
    """What `work` says of the engine between two of its steps."""
    return llm._session.engine.call(work).result(timeout=240)


def check(llm: LLM) -> None:
    """The scheduler's books are right."""
    ask(llm, lambda engine: check_invariants(engine.scheduler))
