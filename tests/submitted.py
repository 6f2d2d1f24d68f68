"""Requests for the engine of an `LLM` as they are, and looks at that engine from the thread that works with it."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tandem import LLM
from tandem.engine.engine import Engine
from tandem.engine.thread import Event
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest

T = TypeVar("T")


def submitted(llm: LLM, requests: Sequence[EngineRequest]) -> Iterator[Output]:
    """What comes of them, until all have ended; raises what goes wrong with one."""
    events: queue.SimpleQueue[Event] = queue.SimpleQueue()
    llm._session.engine.submit(requests, events.put).result()
    live = {request.request_id for request in requests}
    while live:
        event = events.get(timeout=120)
        if isinstance(event, Exception):
            raise event
        if event.finish_reason:
            live.remove(event.request_id)
        yield event


def ask(llm: LLM, work: Callable[[Engine], T]) -> T:
    """What `work` says of the engine between two of its steps."""
    return llm._session.engine.call(work).result(timeout=120)


def check(llm: LLM) -> None:
    """The scheduler's books are right."""
    ask(llm, lambda engine: engine.scheduler.check())
