"""One `AsyncLLM` for many tasks: nothing of an answer is lost, and what is cancelled is stopped."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from llm.conftest import BROKEN, ENDLESS, LAYOUTS, greedy
from tandem import LLM, AsyncLLM
from tandem.errors import ConfigError, RequestError, ServerError, UnavailableError

PROMPTS = [[5, 9, 70, 3, 42], [7] * 40, [11, 12, 13], [300, 4, 8, 15, 16, 23]]


async def live(llm: AsyncLLM) -> int:
    """Requests in the engine."""
    return await asyncio.wrap_future(llm._session.engine.call(lambda engine: len(engine.scheduler.sequences)))


async def until(llm: AsyncLLM, count: int) -> None:
    async with asyncio.timeout(240):
        while await live(llm) != count:
            await asyncio.sleep(0.01)


@pytest.fixture(params=[pytest.param("inline"), pytest.param("pp2", marks=pytest.mark.slow)])
def run(tiny: str, request: pytest.FixtureRequest) -> Callable[[Callable[[AsyncLLM], Awaitable[None]]], None]:
    """Runs a coroutine with a model that has nothing left to do afterwards."""

    async def whole(work: Callable[[AsyncLLM], Awaitable[None]]) -> None:
        async with AsyncLLM(tiny, kv_tokens=300_000, log_level="WARNING", **LAYOUTS[request.param]) as llm:
            await work(llm)
            await until(llm, 0)

    return lambda work: asyncio.run(whole(work))


def test_tasks_share_one(tiny: str, run: Callable[..., None]) -> None:
    with LLM(tiny) as llm:
        expected = [one.text for one in llm.generate(PROMPTS, greedy(60))]
        vectors = llm.embed(PROMPTS)
        said = llm.chat([{"role": "user", "content": "hi"}], greedy(9)).text

    async def work(llm: AsyncLLM) -> None:
        async def streamed(prompt: list[int]) -> str:
            return "".join([piece async for piece in llm.stream(prompt, greedy(60))])

        half = llm.stream(PROMPTS[0], greedy(60))
        begun = await anext(half)
        whole, *texts = await asyncio.gather(llm.generate(PROMPTS, greedy(60)), *map(streamed, PROMPTS * 2))
        assert [one.text for one in whole] == expected and texts == expected * 2
        assert begun + "".join([piece async for piece in half]) == expected[0]
        assert [pytest.approx(one, abs=1e-4) for one in vectors] == await llm.embed(PROMPTS)
        assert (await llm.chat([{"role": "user", "content": "hi"}], greedy(9))).text == said

    run(work)


async def read(llm: AsyncLLM) -> None:
    async for _ in llm.stream(PROMPTS[0], ENDLESS):
        pass


def test_what_is_cancelled_or_forgotten_is_stopped(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        task = asyncio.create_task(llm.generate(PROMPTS, ENDLESS))
        await until(llm, 4)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until(llm, 0)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(read(llm), 0.3)
        await until(llm, 0)
        stream = llm.stream(PROMPTS[0], ENDLESS)
        await anext(stream)
        del stream
        gc.collect()
        await until(llm, 0)
        cancelled = asyncio.create_task(llm.generate(PROMPTS, ENDLESS))
        cancelled.cancel()  # before it has begun
        await asyncio.wait([cancelled])

    run(work)


def test_refusals_stop_the_others(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="no tokens"):
            await llm.generate([PROMPTS[0], []], ENDLESS)
        with pytest.raises(ServerError, match="finite"):
            await llm.generate([PROMPTS[0], [5, BROKEN]], ENDLESS)

    run(work)


def test_the_event_loop_is_never_held_up(run: Callable[..., None]) -> None:
    async def work(llm: AsyncLLM) -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.005)

        ticking = asyncio.create_task(tick())
        await llm.generate(PROMPTS, greedy(300))
        assert ticks > 3
        ticking.cancel()

    run(work)


def test_leaving_by_an_exception_ends_everything(tiny: str) -> None:
    before = set(threading.enumerate())

    async def work() -> None:
        with suppress(ZeroDivisionError):
            async with AsyncLLM(tiny) as llm:
                waiting = asyncio.create_task(llm.generate(PROMPTS, ENDLESS))
                await until(llm, 4)
                raise ZeroDivisionError
        with pytest.raises(UnavailableError, match="this LLM is closed"):
            await waiting
        with pytest.raises(UnavailableError, match="this LLM is closed"):
            await llm.generate(PROMPTS)
        await llm.close()

    asyncio.run(work())
    assert not [one for one in set(threading.enumerate()) - before if one.name in ("engine", "results")]


def test_an_event_loop_that_is_gone_takes_its_requests_with_it(tiny: str) -> None:
    llm = AsyncLLM(tiny)

    async def begin() -> None:
        await llm.start()
        await llm.start()  # nothing more
        kept.append(llm.stream(PROMPTS[0], ENDLESS))
        await anext(kept[0])

    async def go_on() -> None:
        await until(llm, 0)
        assert (await llm.generate([PROMPTS[0]], greedy(3)))[0].finish_reason == "length"
        await llm.close()

    kept: list = []
    asyncio.run(begin())
    asyncio.run(go_on())


def test_mistakes_are_named(tiny: str) -> None:
    async def work() -> None:
        with pytest.raises(RuntimeError, match="the model is not loaded: use `async with"):
            await AsyncLLM(tiny).generate("a")
        with pytest.raises(ConfigError, match="unknown option 'kv_token'"):
            await AsyncLLM(tiny, kv_token=5).start()

    asyncio.run(work())


@pytest.mark.slow
def test_a_start_that_is_cancelled_leaves_nothing(tiny: str) -> None:
    before = set(threading.enumerate())

    async def work() -> None:
        begun, cancelled = asyncio.Event(), threading.Event()
        loop = asyncio.get_running_loop()

        def progress(*_: object) -> None:
            loop.call_soon_threadsafe(begun.set)
            cancelled.wait(240)  # it cannot be over before it is cancelled

        llm = AsyncLLM(tiny, pipeline_parallel_size=2, self_check=False, log_level="WARNING", progress=progress)
        starting = asyncio.create_task(llm.start())
        await begun.wait()
        starting.cancel()
        cancelled.set()
        with pytest.raises(asyncio.CancelledError):
            await starting

    asyncio.run(work())
    assert not [one for one in set(threading.enumerate()) - before if one.name == "engine"]
