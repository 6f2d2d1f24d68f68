"""Helpers for asyncio tasks: cancel and await, or wait until another coroutine ends first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class Stopped(Exception):
    """Raised by `unless` when `stop` or the timeout ended the wait."""


async def end_tasks(*tasks: asyncio.Task[object] | None) -> None:
    """Cancel the tasks (None is skipped) and wait until all have ended; their exceptions are dropped."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def unless(
    stop: Coroutine[None, None, object], work: Coroutine[None, None, Result], timeout_s: float | None = None
) -> Result:
    """Await `work`, but cancel it and raise Stopped when `stop` ends or `timeout_s` (seconds) passes first."""
    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(stop)
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        return working.result()
    finally:
        await end_tasks(*tasks)
