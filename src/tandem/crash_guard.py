"""Crash guard of long-lived threads and tasks: log an unhandled exception, and end the process that depends on them.

A supervisor then starts another process. A thread must never end silently.
"""

from __future__ import annotations

import logging
import os
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:  # ranks start without asyncio
    import asyncio

log = logging.getLogger(__name__)

EXIT_BROKEN = 70
"""Exit code of a process ended by a failed thread or task (EX_SOFTWARE)."""

T = TypeVar("T")
OnFailure = Callable[[BaseException], object]

_own = False
_tasks: set[asyncio.Task[object]] = set()
"""Strong references: the event loop holds tasks only weakly."""


def own_process() -> None:
    """Mark this process as Tandem's own: a failed thread or task then ends it.

    Programs that embed Tandem (see `tandem.LLM`) do not call this and continue.
    """
    global _own
    _own = True


def start_thread(work: Callable[[], object], *, name: str, on_failure: OnFailure | None = None) -> threading.Thread:
    """Start a daemon thread that runs `work`. Log its exception and pass it to `on_failure`, or end the process if None.

    An exception raised by `on_failure` ends the process too.
    """

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - the outermost frame of the thread
            _failed(f"the thread {name!r}", error, on_failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def start_task(work: Coroutine[None, None, T], *, name: str, on_failure: OnFailure | None = None) -> asyncio.Task[T]:
    """Start a task of the running event loop, guarded like `start_thread`. Cancellation is no failure."""
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
        except BaseException as second:  # noqa: BLE001 - the outermost frame
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
    """Flush the log and exit at once with `EXIT_BROKEN`: other threads may wait for the failed one forever."""
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(EXIT_BROKEN)


def _places(error: BaseException) -> str:
    """Return the traceback without the exception's message, which may quote a prompt."""
    return "".join(traceback.format_tb(error.__traceback__)).rstrip()
