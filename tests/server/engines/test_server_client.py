from __future__ import annotations

import asyncio
import contextlib

import pytest

from doubles import Answers
from tandem.errors import OverloadedError, UnavailableError
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.server.engines.engine_client import EngineClient


def request(name, **params):
    return EngineRequest(request_id=name, prompt=[5, 6], params=SamplingParams(max_tokens=50, **params))


@contextlib.asynccontextmanager
async def connected(engine, wait=True, heartbeat_s=0.05):
    client = EngineClient(engine.endpoint, heartbeat_s=heartbeat_s)
    await client.start()
    try:
        while wait and not client.alive:
            await asyncio.sleep(0.01)
        yield client
    finally:
        await client.close()


async def sent(client, *names):
    """What the engine answers to these requests."""
    answers = Answers()
    for name in names:
        if not client.send(request(name), answers):
            raise UnavailableError("nobody is there")
    return answers


async def tokens_of(client, name):
    answers, tokens = await sent(client, name), []
    while True:
        for output in await answers.get():
            tokens += output.tokens
            if output.finish_reason is not None:
                assert not client._sinks
                return tokens


def test_submit_status_and_metrics(engine):
    async def run():
        async with connected(engine) as client:
            assert client.status.max_context == 256
            assert await tokens_of(client, "a") == [*engine.reply, 2]
            assert await client.metrics() == b"tandem_engine_up 1\n"

    asyncio.run(run())
    assert engine.aborted == set()


def test_an_engine_is_heard_of_at_once_and_not_with_the_next_heartbeat(engine):
    async def run():
        async with asyncio.timeout(240), connected(engine, heartbeat_s=3600.0) as client:
            assert client.status.max_context == 256

    asyncio.run(run())


def test_a_request_that_is_aborted_is_stopped_there(engine, wait_until):
    async def run():
        engine.delay = 0.01
        async with connected(engine) as client:
            answers = await sent(client, "a")
            await answers.get()
            client.abort("a")

    asyncio.run(run())
    wait_until(lambda: engine.aborted == {"a"} and engine.detached == 1)


def test_refusal(engine):
    async def run():
        engine.refusal = (429, "full", None, 3.0)
        async with connected(engine) as client:
            with pytest.raises(OverloadedError) as caught:
                await tokens_of(client, "a")
            assert caught.value.retry_after == 3.0

    asyncio.run(run())


def test_outputs_that_arrive_together_are_taken_together(engine):
    async def run():
        async with connected(engine) as client:
            answers = await sent(client, "a", "b")
            while sum(one.finish_reason is not None for one in answers.outputs) < 2:  # the last of both is here
                await asyncio.sleep(0.01)
            outputs = await answers.get()
            assert len(outputs) == 2 * (len(engine.reply) + 1)

    asyncio.run(run())


def test_no_engine(engine):
    async def run():
        engine.stop()
        async with connected(engine, wait=False) as client:
            with pytest.raises(UnavailableError):
                await tokens_of(client, "a")
            assert await client.metrics() == b""

    asyncio.run(run())


def test_restart_is_noticed_at_once_and_forgotten_soon(engine):
    async def run():
        async with connected(engine) as client:
            engine.hold = True
            waiting = asyncio.create_task(tokens_of(client, "a"))
            while "a" not in engine.submitted:
                await asyncio.sleep(0.01)
            engine.stop()
            engine.start()
            with pytest.raises(UnavailableError):
                await asyncio.wait_for(waiting, 240)
            engine.hold = False
            while not client.alive:
                await asyncio.sleep(0.01)
            assert await tokens_of(client, "b") == [*engine.reply, 2]

    asyncio.run(run())


def test_unreadable_messages_are_survived(engine, caplog):
    async def run():
        async with connected(engine) as client:
            assert await tokens_of(client, "a") == [*engine.reply, 2]

    engine.garbage = True
    asyncio.run(run())
    assert "unreadable message from the engine" in caplog.text


def test_a_change_of_adapters_ends_with_its_engine(engine):
    async def run():
        async with asyncio.timeout(240), connected(engine) as client:
            engine.silent = True
            change = asyncio.ensure_future(client.change_adapter("a", "/a"))
            await asyncio.sleep(0)
            engine.stop()
            assert (await change).status == 503

    asyncio.run(run())
