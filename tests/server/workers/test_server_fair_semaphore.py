"""Whose costly work comes next."""

from __future__ import annotations

import asyncio

import pytest

from tandem.errors import OverloadedError
from tandem.server.workers import fair_semaphore
from tandem.server.workers.fair_semaphore import FairSemaphore


class Work:
    """Pieces of work that last until they are told to end; `begun` says which have a turn, in their order."""

    def __init__(self, at_once, most_waiting=0):
        self.fair_semaphore = FairSemaphore(at_once, most_waiting)
        self.begun, self.ends, self.tasks = [], {}, {}

    async def add(self, name, size=0):
        self.ends[name] = asyncio.Event()

        async def run():
            async with self.fair_semaphore.turn(name[0], size):
                self.begun.append(name)
                await self.ends[name].wait()

        self.tasks[name] = asyncio.create_task(run())
        await asyncio.sleep(0)

    async def end(self, name):
        self.ends[name].set()
        await self.tasks[name]
        await asyncio.sleep(0)

    async def cancel(self, name):
        self.tasks[name].cancel()
        await asyncio.gather(self.tasks[name], return_exceptions=True)
        await asyncio.sleep(0)

    async def close(self):
        for name in self.tasks:
            await self.cancel(name)


def test_one_client_never_has_all_turns():
    async def run():
        work = Work(2)
        for name in ("a1", "a2", "a3", "b1", "c1"):
            await work.add(name)
        assert work.begun == ["a1", "b1"], "the second of a waits, though it came first"
        await work.end("b1")
        assert work.begun == ["a1", "b1", "c1"]
        await work.end("a1")
        await work.end("c1")
        assert work.begun == ["a1", "b1", "c1", "a2"], "a still has but one"
        await work.close()

    asyncio.run(run())


def test_a_client_with_fewer_turns_comes_before_one_that_has_waited_longer():
    async def run():
        work = Work(4)
        for name in ("a1", "a2", "a3", "a4", "a5", "b1", "b2"):
            await work.add(name)
        assert work.begun == ["a1", "a2", "a3", "b1"]
        await work.end("a1")
        assert work.begun[-1] == "b2"
        await work.end("a2")
        assert work.begun[-1] == "a4"
        await work.close()

    asyncio.run(run())


def test_who_leaves_gives_his_turn_back_and_his_place_in_the_queue():
    async def run():
        work = Work(2)
        for name in ("a1", "a2", "a3"):
            await work.add(name)
        await work.cancel("a2")
        await work.cancel("a1")
        assert work.begun == ["a1", "a3"]
        await work.end("a3")
        await work.add("a4")
        assert work.begun[-1] == "a4"
        await work.close()

    asyncio.run(run())


@pytest.mark.parametrize(("limit", "size"), [("MOST_WAITING", 0), ("MOST_WAITING_BYTES", 1)])
def test_what_waits_for_one_client_has_a_limit(monkeypatch, limit, size):
    monkeypatch.setattr(fair_semaphore, limit, 3)

    async def run():
        work = Work(2)
        for number in range(5):
            await work.add(f"a{number}", size)
        with pytest.raises(OverloadedError, match="3 large requests of yours wait"):
            await work.tasks["a4"]
        await work.add("b1", size)
        assert work.begun == ["a0", "b1"]
        await work.close()

    asyncio.run(run())


def test_a_server_with_a_longer_queue_has_more_that_wait(monkeypatch):
    monkeypatch.setattr(fair_semaphore, "MOST_WAITING", 1)

    async def run():
        work = Work(2, most_waiting=3)
        for number in range(5):
            await work.add(f"a{number}")
        with pytest.raises(OverloadedError, match="3 large requests of yours wait"):
            await work.tasks["a4"]
        await work.close()

    asyncio.run(run())
