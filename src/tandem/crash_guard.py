"""Crash guard of threads and tasks that live for long: what one raises is logged, and ends the process that cannot do
without it, so that its supervisor starts another. A thread that ends without a word is worse.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # ranks start without it
    import asyncio

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""Exit code of a process that a thread or task of its own has broken (EX_SOFTWARE)."""

T = TypeVar("T")
OnFailure = Callable[[BaseException], object]

_own = False
_tasks: set[asyncio.Task[object]] = set()
"""The event loop itself keeps no task alive."""


def own_process() -> None:
    """Mark this process as Tandem's own, to be ended when a thread or task breaks. Others (see `tandem.LLM`) go on."""
    global _own
    _own = True


def start_thread(work: Callable[[], object], *, name: str, on_failure: OnFailure | None = None) -> threading.Thread:
    """Start a daemon thread that does `work`. An exception is logged and handed to `on_failure`, or ends the process.

    What `on_failure` raises ends the process too.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - this is the border
            _failed(f"the thread {name!r}", error, on_failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def start_task(work: Coroutine[None, None, T], *, name: str, on_failure: OnFailure | None = None) -> asyncio.Task[T]:
    """Start a task of the running event loop, guarded as by `start_thread`; a cancelled one has not failed."""
    import asyncio

    task = asyncio.get_running_loop().create_task(work, name=name)
    _tasks.add(task)

    def ended(_: asyncio.Task[T]) -> None:
        _tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _failed(f"the task {name!r}", error, on_failure)

    task.add_done_callback(ended)
    return task


def _failed(what: str, error: BaseException, on_failure: OnFailure | None) -> None:
    if on_failure is not None:
        try:
            on_failure(error)
        except BaseException as second:  # noqa: BLE001 - this is the border
            error = second
        else:
            log.error(
                "%s has failed: %s; what it did has ended, the process goes on; please report it\n%s",
                what,
                type(error).__name__,
                _places(error),
            )
            return
    follows = "this process ends, for another to be started in its place" if _own else "nothing replaces it"
    log.critical("%s has failed: %s; %s; please report it\n%s", what, type(error).__name__, follows, _places(error))
    if _own:
        end_process()


def end_process() -> None:
    """End at once: the other threads may wait for the one that has failed."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_BROKEN)


def _places(error: BaseException) -> str:
    """Return where it was raised. Its message is left out: that of a foreign exception may quote a prompt."""
    return "".join(traceback.format_tb(error.__traceback__)).rstrip()
