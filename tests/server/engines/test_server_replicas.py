from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from doubles import Answers
from tandem.errors import NotFoundError, OverloadedError, ServerError, UnavailableError
from tandem.protocol.control import Refused
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.protocol.supervisor_messages import ReplicaInfo
from tandem.server.engines import replicas as replicas_module
from tandem.server.engines.engine_client import Member
from tandem.server.engines.replicas import Replicas, merged_metrics, merged_status
from tandem.server.engines.router import Router


@pytest.fixture
def engines(engine, model_dir):
    """Three engines that answer from a script; a request takes a moment."""
    others = [type(engine)(model_dir) for _ in range(2)]
    for one in others:
        one.start()
    every = [engine, *others]
    for one in every:
        one.delay = 0.02
    yield every
    for one in every:
        one.stop()
        Path(one.path).unlink(missing_ok=True)


@contextlib.asynccontextmanager
async def connected(engines, patience_s=0.0):
    replicas = Replicas(Router(), {i: one.endpoint for i, one in enumerate(engines)}, heartbeat_s=0.2, patience_s=patience_s)
    await replicas.start()
    try:
        await until(lambda: all(one.state != "unreachable" for one in replicas.replicas()))
        yield replicas
    finally:
        await replicas.close()


async def until(condition):
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.01)


def request(name, **params):
    return EngineRequest(request_id=name, prompt=[5, 6], params=SamplingParams(**{"max_tokens": 50, **params}))


async def outputs_of(replicas, request):
    """Its outputs; leaving the loop early aborts it."""
    answers = Answers()
    replicas.requests.open([request], answers)
    try:
        while True:
            for output in await answers.get():
                yield output
                if output.finish_reason is not None:
                    return
    finally:
        replicas.requests.abort(request.request_id)


def slow(engines, delay=5.0):
    """Between the first token of a request and its second one there is time to look; or not any more."""
    for one in engines:
        one.delay = delay


def in_loop(test):
    """The test is a coroutine."""

    @functools.wraps(test)
    def run(*arguments, **fixtures):
        asyncio.run(test(*arguments, **fixtures))

    return run


async def answers_of(replicas, name, **params):
    return [output async for output in outputs_of(replicas, request(name, **params))]


async def held(replicas, engines):
    """A request `a` that one engine has and none answers: its task, and the engine's number."""
    for one in engines:
        one.hold = True
    task = asyncio.create_task(answers_of(replicas, "a"))
    await until(lambda: where(engines, "a"))
    [home] = where(engines, "a")
    return task, home


def where(engines, name):
    """Numbers of the engines that got the request, in any sending."""
    return [i for i, one in enumerate(engines) for key in list(one.submitted) if key.partition("+")[0] == name]


def test_requests_spread_and_everything_is_forgotten(engines):
    async def run():
        async with connected(engines) as replicas:
            answers = await asyncio.gather(*(answers_of(replicas, f"r{i}") for i in range(6)))
            for answer in answers:
                assert [token for output in answer for token in output.tokens] == [*engines[0].reply, 2]
            assert [one.outstanding_tokens for one in replicas.replicas()] == [0, 0, 0]
            assert replicas.requests._inflights == {}
            assert all(not member.client._sinks for member in replicas._members.values())

    asyncio.run(run())
    assert [len(one.submitted) for one in engines] == [2, 2, 2]
    assert all(not one.aborted for one in engines)


def test_leaving_aborts_where_it_runs(engines, wait_until):
    async def run():
        async with connected(engines) as replicas:
            stream = outputs_of(replicas, request("a"))
            async for _ in stream:
                break
            await stream.aclose()
            assert [one.outstanding_tokens for one in replicas.replicas()] == [0, 0, 0]

    asyncio.run(run())
    [home] = where(engines, "a")
    wait_until(lambda: engines[home].aborted == {"a"})


@in_loop
async def test_a_lost_engine_hands_its_requests_on(engines, caplog):
    async with connected(engines) as replicas:
        slow(engines)
        task = asyncio.create_task(answers_of(replicas, "a", temperature=1.0))
        await until(lambda: where(engines, "a"))
        [home] = where(engines, "a")
        await until(lambda: replicas.requests._inflights["a"].produced)
        slow(engines, 0.02)
        engines[home].stop()
        outputs = await asyncio.wait_for(task, 240)
        assert {output.request_id for output in outputs} == {"a"}
        first = engines[home].submitted["a"]
        [moved] = [one.submitted["a+1"] for one in engines if "a+1" in one.submitted]
        assert moved.produced
        assert moved.produced == [t for output in outputs for t in output.tokens][: len(moved.produced)]
        assert moved.params == first.params
        assert moved.params.seed is not None
        assert moved.prompt == [5, 6]
        assert b"tandem_requests_moved_total 1.0" in await replicas.metrics()
        assert "the engine is gone; its requests (1) wait for another" in caplog.text
        states = {one.replica: one.state for one in replicas.replicas()}
        assert states.pop(home) == "unreachable"
        assert set(states.values()) == {"ready"}


@in_loop
@pytest.mark.parametrize("kind", [{"pooling": "last"}, {}])
async def test_what_has_no_tokens_is_begun_again_where_another_engine_is(engines, kind):
    async with connected(engines) as replicas:
        for one in engines:
            one.hold = True
        params = SamplingParams(max_tokens=0, prompt_logprobs=None if kind else 1)
        asked = EngineRequest(request_id="v", prompt=[5, 6], params=params, **kind)

        async def collect():
            return [output async for output in outputs_of(replicas, asked)]

        task = asyncio.create_task(collect())
        await until(lambda: where(engines, "v"))
        [home] = where(engines, "v")
        for one in engines:
            one.hold = one is engines[home]
        engines[home].stop()
        [output] = await asyncio.wait_for(task, 240)
        assert output.request_id == "v" and output.finish_reason == ("stop" if kind else "length")
        assert bool(output.vector) == bool(kind) and (output.prompt_logprobs is None) == bool(kind)
        assert replicas.requests._inflights == {}


@in_loop
async def test_a_silent_engine_is_lost_too(engines):
    async with connected(engines[:2]) as replicas:
        task, home = await held(replicas, engines)
        engines[home].silent = True
        engines[1 - home].hold = False
        assert await asyncio.wait_for(task, 240)


@in_loop
async def test_a_request_waits_for_an_engine_when_all_are_lost(engines):
    [home] = engines[:1]
    async with connected([home], patience_s=10) as replicas:
        slow([home])
        task = asyncio.create_task(answers_of(replicas, "a"))
        await until(lambda: where([home], "a") and replicas.requests._inflights["a"].produced)
        home.stop()
        slow([home], 0.02)
        await until(lambda: not replicas.alive)
        with pytest.raises(UnavailableError):
            replicas.requests.open([request("new")], Answers())
        await asyncio.sleep(0.2)
        home.start()
        outputs = await asyncio.wait_for(task, 240)
        [again] = [one for key, one in home.submitted.items() if key.startswith("a+")]
        assert again.produced
        assert again.quarantine_record.company == 1
        assert sum(bool(output.finish_reason) for output in outputs) == 1


@in_loop
@pytest.mark.parametrize("patience_s", [0.0, 0.5])
async def test_it_waits_for_so_long_and_no_longer(engines, patience_s):
    async with connected(engines[:1], patience_s=patience_s) as replicas:
        task, home = await held(replicas, engines[:1])
        engines[home].stop()
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(task, 240)
        with pytest.raises(UnavailableError):
            await answers_of(replicas, "b")
        assert not replicas.alive
        assert replicas.requests._inflights == {}


@in_loop
async def test_what_kills_engines_is_not_tried_for_ever(engines):
    async with connected(engines, patience_s=60.0) as replicas:
        for one in engines:
            one.hold = True
        task = asyncio.create_task(answers_of(replicas, "killer"))
        for losses in range(4):
            holds = lambda one: any(name.startswith("killer") for name in list(one._live))  # noqa: E731
            await until(lambda: any(map(holds, engines)))  # noqa: B023 - awaited at once
            if losses >= 2:
                await until(lambda: replicas.requests._inflights["killer"].trial)
            [holder] = filter(holds, engines)
            holder.stop()
            holder._live.clear()
            holder.start()
        with pytest.raises(ServerError, match="4 engines were lost .* ran alone"):
            await asyncio.wait_for(task, 240)


@in_loop
async def test_an_engine_that_dies_while_nothing_runs_there_clears_everybody(engines):
    async with connected(engines[:1], patience_s=60.0) as replicas:
        [engine] = engines[:1]
        engine.hold = engine.rests = True
        task = asyncio.create_task(answers_of(replicas, "a"))
        for losses in range(8):
            await until(lambda: engine._live)
            inflight = replicas.requests._inflights["a"]
            await until(lambda: (inflight.trial is not None) == inflight.quarantine_record.suspect)  # noqa: B023
            engine.stop()
            engine._live.clear()
            await until(lambda: inflight.losses > losses)  # noqa: B023 - awaited at once
            assert inflight.quarantine_record.suspect == (losses % 4 in (1, 2))
            engine.start()
        engine.hold = False
        assert await asyncio.wait_for(task, 240)


@in_loop
async def test_a_full_engine_is_passed_over(engines):
    async with connected(engines) as replicas:
        engines[0].refusal = engines[1].refusal = (429, "full", None, 3.0)
        assert await answers_of(replicas, "a")
        engines[2].refusal = (429, "full", None, 3.0)
        with pytest.raises(OverloadedError):
            await answers_of(replicas, "b")
        assert sorted(where(engines, "b")) == [0, 1, 2]
        engines[0].refusal = engines[1].refusal = engines[2].refusal = (400, "bad", "x", None)
        with pytest.raises(Exception, match="bad"):
            await answers_of(replicas, "c")
        assert len(where(engines, "c")) == 1


@in_loop
async def test_what_was_accepted_waits_for_room_elsewhere(engines):
    async with connected(engines[:2]) as replicas:
        task, home = await held(replicas, engines)
        other = engines[1 - home]
        other.hold, other.refusal = False, (429, "full", None, 1.0)
        engines[home].stop()
        await until(lambda: other.submitted)
        await asyncio.sleep(0.1)
        assert not task.done()
        other.refusal = None
        assert await asyncio.wait_for(task, 240)


@in_loop
async def test_the_rest_of_what_was_accepted_waits_for_room(engines):
    async with connected(engines[:1]) as replicas:
        engines[0].refusal = (429, "full", None, 1.0)
        answers = Answers()
        replicas.requests.open([request("rest")], answers, accepted=True)
        await until(lambda: len(engines[0].submitted) > 1)
        assert answers.error is None
        engines[0].refusal = None
        assert await asyncio.wait_for(answers.get(), 240)
        replicas.requests.abort("rest")


@in_loop
async def test_draining_joining_and_leaving(engines):
    def infos(*states):
        return [ReplicaInfo(i, engines[i].endpoint, state, 1, 0) for i, state in enumerate(states) if state]

    async with connected(engines[:2]) as replicas:
        for one in engines:
            one.hold = True
        staying = asyncio.create_task(answers_of(replicas, "a"))
        await until(lambda: where(engines, "a"))
        assert where(engines, "a") == [0]
        await replicas.update(infos("draining", "running"))
        others = [asyncio.create_task(answers_of(replicas, f"b{i}")) for i in range(3)]
        await until(lambda: len(engines[1].submitted) == 3)
        assert list(engines[0].submitted) == ["a"]
        assert replicas.replicas()[0].state == "draining"
        await replicas.update(infos("draining", "running", "running"))
        await until(lambda: replicas.replicas()[2].state == "ready")
        last = asyncio.create_task(answers_of(replicas, "c"))
        await until(lambda: engines[2].submitted)
        await replicas.update(infos(None, "running", "running"))
        for one in engines:
            one.hold = False
        assert all(await asyncio.gather(staying, last, *others))
        assert [one.replica for one in replicas.replicas()] == [1, 2]
        await until(lambda: engines[0].detached == 1)
        assert b'replica="0"' not in await replicas.metrics()


def draining(engines, *numbers):
    """As the supervisor says it."""
    return [ReplicaInfo(i, one.endpoint, "draining" if i in numbers else "running", 1, 0) for i, one in enumerate(engines)]


@in_loop
async def test_what_runs_at_a_draining_replica_goes_to_one_that_reads_what_it_wrote(engines, caplog):
    for one in engines[:2]:
        one.set_status(kv_store="disk", disk_saves=0.9)
    async with connected(engines[:2]) as replicas:
        task, home = await held(replicas, engines)
        heir = engines[1 - home]
        heir.refusal = (429, "full", None, 1.0)
        await replicas.update(draining(engines[:2], home))
        await until(lambda: heir.submitted)
        assert not task.done(), "it was accepted once"
        heir.refusal = None
        await until(lambda: heir._live)
        [sent] = heir._live.values()
        assert sent.request.kept == 768 and not engines[home]._live
        assert b"tandem_requests_moved_total 1.0" in await replicas.metrics()
        engines[home].set_status(state="draining")
        await until(lambda: replicas._members[home].client.status.state == "draining")
        engines[home].stop()  # as it should: that is no news
        await until(lambda: not replicas._members[home].client.alive)
        assert "engine is gone" not in caplog.text
        await replicas.update(draining(engines[:2], 0, 1))  # nobody else is left: it is finished there
        heir.hold = False
        assert await asyncio.wait_for(task, 240)


@in_loop
async def test_a_draining_replica_that_lends_is_told_when_others_have_what_they_need(engines):
    for one, store in zip(engines[:2], "ab", strict=True):
        one.set_status(kv_store=store, kv_reach=[store])
    async with connected(engines[:2]) as replicas:
        task, home = await held(replicas, engines)
        heir, store = engines[1 - home], "ab"[home]
        await replicas.update(draining(engines[:2], home))
        assert not heir.submitted, "it cannot have what is computed there"
        heir.set_status(kv_reach=["a", "b"])

        async def moved():
            await replicas.refresh()
            await replicas.update(draining(engines[:2], home))
            return heir._live

        async with asyncio.timeout(240):
            while not await moved():
                await asyncio.sleep(0.02)
        [sent] = heir._live.values()
        assert sent.request.kept == 768 and not engines[home].aborted, f"{store} is read until it answers"
        heir.hold = False
        assert await asyncio.wait_for(task, 240)
        await until(lambda: engines[home].aborted == {"a"})


@in_loop
async def test_what_runs_at_a_draining_replica_without_a_common_disk_is_finished_there(engines):
    for one, store in zip(engines, ("", "", "c"), strict=True):
        one.set_status(kv_store=store)
    async with connected(engines) as replicas:
        task, home = await held(replicas, engines)
        await replicas.update(draining(engines, home))
        for one in engines:
            one.hold = False
        assert await asyncio.wait_for(task, 240)
        assert where(engines, "a") == [home]


@in_loop
async def test_what_a_replica_has_that_stays_without_its_ranks_goes_on_elsewhere(engines, monkeypatch):
    async with connected(engines[:2]) as replicas:
        task, home = await held(replicas, engines)
        heir = engines[1 - home]
        engines[home].set_status(state="recovering")

        async def look():
            await replicas.refresh()
            await replicas.update(draining(engines[:2]))

        await look()
        await look()
        assert not heir.submitted, "its ranks may come back"
        monkeypatch.setattr(replicas_module, "STRANDED_S", -1.0)
        heir.set_status(state="recovering")
        await look()
        assert not heir.submitted, "nobody else is ready"
        heir.set_status(state="ready")
        await look()
        await until(lambda: heir._live and engines[home].aborted == {"a"})
        assert b"tandem_requests_moved_total 1.0" in await replicas.metrics()
        heir.hold = False
        assert await asyncio.wait_for(task, 240)
        engines[home].set_status(state="ready")
        await look()
        assert replicas._members[home].without_ranks is None


@in_loop
async def test_n_choices_of_one_request_over_a_loss(engines):
    async with connected(engines[:2]) as replicas:
        names = [f"a-{i}" for i in range(4)]
        answers = Answers()
        replicas.requests.open([request(name) for name in names], answers)
        await asyncio.sleep(0.1)
        engines[0].stop()
        left = set(names)
        while left:
            for output in await asyncio.wait_for(answers.get(), 240):
                if output.finish_reason:
                    left.remove(output.request_id)


def test_status_is_the_sum(engines):
    engines[0].set_status(state="starting", kv_tokens_total=0, max_context=200)
    engines[1].set_status(running=2, queued=1, restarts=1)

    async def run():
        async with connected(engines[:2]) as replicas:
            status = replicas.status
            assert (status.state, status.max_context) == ("ready", 200)
            assert (status.running, status.queued, status.kv_tokens_total, status.restarts) == (2, 1, 4096, 1)
            assert [rank.replica for rank in status.ranks] == [0, 1]
            assert replicas.status is status or replicas.status == status
            engines[0].stop()
            await until(lambda: len(replicas.status.ranks) == 1)

    asyncio.run(run())


def test_merged_metrics():
    one = b'# HELP a_total Things.\n# TYPE a_total counter\na_total{x="{1"} 1.0\na_total{z="2"} 2.0\n'
    one += b"# TYPE b gauge\nb{} 3\n"
    merged = merged_metrics({0: one, 3: one, 5: b""})
    assert merged.decode().splitlines() == [
        "# HELP a_total Things.", "# TYPE a_total counter", 'a_total{replica="0",x="{1"} 1.0',
        'a_total{replica="0",z="2"} 2.0', 'a_total{replica="3",x="{1"} 1.0', 'a_total{replica="3",z="2"} 2.0',
        "# HELP b ", "# TYPE b gauge", 'b{replica="0"} 3.0', 'b{replica="3"} 3.0',
    ]  # fmt: skip
    assert b'\nb{model="m",replica="3"} 3.0\n' in merged_metrics({"m": merged}, "model")


def test_the_best_state_stands_for_all(engine):
    def state(*states):
        return merged_status([(i, msgspec.structs.replace(engine.status, state=s)) for i, s in enumerate(states)]).state

    assert state("failed", "recovering", "starting") == "recovering"
    assert state("draining", "ready") == "ready"
    assert state("odd") == "odd"
    gone = SimpleNamespace(status=engine.status, alive=False)
    assert Member(gone).shown(1, 0).state == "unreachable"
    draining = ReplicaInfo(1, "", "draining", None, 0)
    assert Member(SimpleNamespace(status=None, alive=False), draining).shown(1, 0).state == "draining"


def test_refusals_keep_their_status():
    assert isinstance(Refused("a", 404, "x").as_error(), NotFoundError)
    assert math.isclose(Refused("a", 429, "x", retry_after=2.5).as_error().retry_after, 2.5)
    assert Refused("a", 999, "x").as_error().status == 500
