"""Thread for the journal; concurrent calls are batched into one transaction and one disk sync."""

from __future__ import annotations

import asyncio
import functools
import logging
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar, cast

from tandem.crash_guard import start_task
from tandem.errors import RequestError, UnavailableError
from tandem.server.store.journal import Journal, told

logger = logging.getLogger(__name__)

Given = ParamSpec("Given")
Result = TypeVar("Result")
Call = Callable[[], object]


class Writer:
    """Runner of journal calls in a thread, in order. Not thread-safe: use on one event loop."""

    def __init__(self, journal: Journal, on_error: Callable[[], None]) -> None:
        """`on_error` is called in the thread for each SQLite failure."""
        self._journal = journal
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, "journal")
        self._calls: list[tuple[Call, asyncio.Future[object]]] = []
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._trouble = ""

    async def run(self, call: Callable[Given, Result], *arguments: Given.args, **options: Given.kwargs) -> Result:
        """Call a method of the journal and return its result after the commit.

        Raises JournalError, and any RequestError of the method.
        """
        if self._closed:
            raise UnavailableError("The server is shutting down.", code="shutting_down")
        future: asyncio.Future[object] = asyncio.get_running_loop().create_future()
        self._calls.append((functools.partial(call, *arguments, **options), future))
        if self._task is None or self._task.done():
            self._task = start_task(self._work(), name="journal")
        return cast(Result, await future)

    async def tidy(self, keep_s: float, lines_bytes: int = 0) -> bool:
        """Call `Journal.tidy` and return its result; return False after a failure, which is logged."""
        return await self._in_thread(self._try, functools.partial(self._journal.tidy, keep_s, lines_bytes)) is True

    async def close(self) -> None:
        """Finish pending calls and close the journal."""
        self._closed = True
        if self._task is not None:
            await self._task
        await self._in_thread(self._try, self._journal.close)
        self._thread.shutdown()

    async def _work(self) -> None:
        while self._calls:
            calls, self._calls = self._calls, []
            outcomes = await self._in_thread(self._together, [call for call, _ in calls])
            for (_, future), outcome in zip(calls, outcomes, strict=True):
                if future.done():
                    continue  # its caller was cancelled
                if isinstance(outcome, Exception):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

    async def _in_thread(self, function: Callable[Given, Result], *arguments: Given.args, **options: Given.kwargs
                         ) -> Result:  # fmt: skip
        call = functools.partial(function, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    # --- in the thread ---

    def _together(self, calls: list[Call]) -> list[object]:
        """Run calls in one transaction; return the result of each, or its exception."""

        def all_of_them() -> list[object]:
            with self._journal.transaction():
                return [_result(call) for call in calls]

        outcome = self._try(all_of_them)
        if isinstance(outcome, list):
            return outcome
        if len(calls) == 1:
            return [outcome]
        # One call may have caused the failure: run them one by one, so that the others succeed.
        return [outcome for call in calls for outcome in self._together([call])]

    def _try(self, function: Call) -> object:
        """Return the result or the exception; an SQLite failure is logged once until its message changes."""
        try:
            return function()
        except sqlite3.Error as error:
            self._on_error()
            failure = told(error)
            if failure.message != self._trouble:
                logger.error("%s", failure.message)
            self._trouble = failure.message
            return failure
        except Exception as error:  # noqa: BLE001 - passed on to the caller on the event loop
            return error


def _result(call: Call) -> object:
    try:
        return call()
    except RequestError as error:
        return error
