"""Waiting for one thing unless another comes first, and ending tasks."""

from __future__ import annotations

import asyncio

import pytest

from tandem.server.waiting import Stopped, end_tasks, unless


async def never():
    await asyncio.Event().wait()


async def soon(value):
    await asyncio.sleep(0)
    if isinstance(value, Exception):
        raise value
    return value


def test_what_comes_first_decides():
    async def run():
        assert await unless(never(), soon(7)) == 7
        with pytest.raises(ValueError, match="wrong"):
            await unless(never(), soon(ValueError("wrong")))
        with pytest.raises(Stopped):
            await unless(soon(None), never())
        with pytest.raises(Stopped):
            await unless(never(), never(), 0.01)
        assert len(asyncio.all_tasks()) == 1, "nothing is left of what was waited for"

    asyncio.run(run())


def test_work_that_is_stopped_has_ended_before_the_wait_is_over():
    ended = []

    async def work():
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            ended.append("work")

    async def run():
        with pytest.raises(Stopped):
            await unless(soon(None), work())
        assert ended == ["work"]
        waiting = asyncio.create_task(unless(never(), work()))
        await asyncio.sleep(0.01)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert ended == ["work", "work"]

    asyncio.run(run())


def test_tasks_end_however_they_do():
    async def run():
        tasks = [asyncio.create_task(never()), asyncio.create_task(soon(ValueError("said by nobody")))]
        await asyncio.sleep(0.01)
        await end_tasks(None, *tasks)
        assert all(task.done() for task in tasks)

    asyncio.run(run())
