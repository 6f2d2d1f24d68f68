"""Ending tasks, and waiting for one thing unless another comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

Result = TypeVar("Result")


class Stopped(Exception):
    """Raised by `unless` when the wait ended before the work."""


async def end_tasks(*tasks: asyncio.Task[object] | None) -> None:
    """Cancel tasks, but for None among them, and wait until they have ended, however they do."""
    ending = [task for task in tasks if task is not None]
    for task in ending:
        task.cancel()
    await asyncio.gather(*ending, return_exceptions=True)


async def unless(
    stop: Coroutine[None, None, object], work: Coroutine[None, None, Result], timeout_s: float | None = None
) -> Result:
    """Return what `work` returns. Raises what it raises, and Stopped when `stop` or the time ends first."""
    tasks = working, _ = asyncio.ensure_future(work), asyncio.ensure_future(stop)
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Stopped
        return working.result()
    finally:
        await end_tasks(*tasks)
