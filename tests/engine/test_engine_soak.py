"""Hundreds of random requests over real ranks: each is answered, invariants hold throughout, and nothing is left."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_invariants import check_invariants
from tandem.config.settings import ModelSettings, ParallelSettings, SchedulerSettings, Settings
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.errors import OutOfMemory, RankFailure, UnavailableError, UsageError
from tandem.protocol.control import Output, Refused
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "gemma3_text")


def settings(model: Path, stages: int = 2, **scheduler: object) -> Settings:
    return Settings(
        model=ModelSettings(model=str(model)),
        parallel=ParallelSettings(pipeline_parallel_size=stages, executor="cluster"),
        scheduler=SchedulerSettings(prefill_chunk=32, **scheduler),
    )  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    chosen = settings(model)
    one = Engine(chosen, plan_layout(chosen))
    one.start()
    yield one
    pids = one.executor.pids
    one.close()
    assert_gone(pids)


def assert_gone(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def a_request(rng: random.Random, name: str) -> EngineRequest:
    hot = rng.random() < 0.7
    params = SamplingParams(
        max_tokens=rng.randint(1, 25),
        temperature=rng.uniform(0.3, 1.5) if hot else 0.0,
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 20]),
        seed=rng.choice([None, rng.randrange(2**40)]),
        stop_token_ids=tuple(rng.sample(range(3, 500), 20)) if rng.random() < 0.3 else (),
        repetition_penalty=rng.choice([1.0, 1.1]),
        logprobs=rng.choice([None, None, 0, 3]),
    )
    prompt = [rng.randrange(3, 500) for _ in range(rng.randint(1, 120))]
    return EngineRequest(request_id=name, prompt=prompt, params=params)


def run(engine: Engine, requests: list[EngineRequest], rng: random.Random, abort_share: float) -> dict[str, list[int]]:
    """Feed `requests` at a random pace; returns the tokens of those that were not aborted."""
    todo, live, answers = list(requests), set(), {}
    while todo or not engine.idle:
        while todo and (len(live) < 12 or rng.random() < 0.05):
            request = todo.pop()
            engine.submit(request)
            live.add(request.request_id)
            answers[request.request_id] = []
        if live and rng.random() < abort_share:
            name = rng.choice(sorted(live))
            live.remove(name)
            del answers[name]
            assert engine.abort(name)
        for message in engine.pump(1.0):
            assert isinstance(message, Output), message
            if message.request_id in answers:
                answers[message.request_id] += message.tokens
                if message.finish_reason:
                    live.remove(message.request_id)
        check_invariants(engine.scheduler)
    assert not live
    return answers


def test_300_random_requests_are_all_answered_and_leave_nothing_behind(engine: Engine) -> None:
    rng = random.Random(42)
    requests = [a_request(rng, f"r{i}") for i in range(300)]
    answers = run(engine, requests, rng, abort_share=0.03)
    assert 180 < len(answers) < 300
    limits = {request.request_id: request.params.max_tokens for request in requests}
    assert all(1 <= len(tokens) <= limits[name] for name, tokens in answers.items())
    for _ in range(100):  # what ranks say of their last step may come after its tokens
        status = engine.status()
        if not any(rank.kv_bytes for rank in status.ranks):
            break
        engine.pump(0.1)
    assert (status.queued, status.running, status.kv_tokens_used) == (0, 0, 0)
    assert [rank.kv_bytes for rank in status.ranks] == [0, 0], "the ranks' caches are empty"
    again = [request for request in requests if request.params.seed is not None][:20]
    repeated = run(engine, again, rng, abort_share=0.0)
    assert all(repeated[name] == answers[name] for name in repeated if name in answers), "same seed, same tokens"


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_costs_a_pause_and_no_token(engine: Engine, victim: int, sig: signal.Signals) -> None:
    rng = random.Random(7)
    requests = [a_request(rng, f"r{i}") for i in range(8)]
    requests = [r for r in requests if r.params.seed is not None or r.params.temperature == 0.0]
    undisturbed, before = run(engine, requests, rng, abort_share=0.0), engine.restarts
    got: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    killed = False
    while not engine.idle:
        for message in engine.pump(1.0):
            assert isinstance(message, Output), message
            got[message.request_id] += message.tokens
        if not killed and sum(map(len, got.values())) > 10:
            os.kill(engine.executor.pids[victim], sig)
            killed = True
    assert killed and engine.restarts == before + 1
    assert got == undisturbed


def test_a_rank_that_is_stopped_counts_as_stuck(model: Path) -> None:
    chosen = settings(model)
    engine = Engine(chosen, plan_layout(chosen))
    engine.start()
    try:
        params = SamplingParams(max_tokens=30, ignore_eos=True)
        engine.submit(EngineRequest(request_id="a", prompt=[5, 6, 7], params=params))
        os.kill(engine.executor.pids[1], signal.SIGSTOP)
        tokens = 0
        while not engine.idle:
            tokens += sum(len(m.tokens) for m in engine.pump(1.0) if isinstance(m, Output))
        assert tokens == 30 and engine.restarts == 1
    finally:
        engine.close()


def pump_for(engine: Engine, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        engine.pump(1.0)


def test_an_engine_whose_ranks_keep_dying_gives_up_and_says_so(model: Path) -> None:
    chosen = settings(model, max_restarts=0)
    engine = Engine(chosen, plan_layout(chosen))
    engine.start()
    try:
        engine.submit(EngineRequest(request_id="a", prompt=[5], params=SamplingParams(max_tokens=30)))
        os.kill(engine.executor.pids[0], signal.SIGKILL)
        with pytest.raises(RankFailure, match="gave up"):
            pump_for(engine, 240.0)
        assert engine.state == "failed"
        refused = engine.failures(RuntimeError("x"))
        assert [message.status for message in refused if isinstance(message, Refused)] == [503]
        with pytest.raises(UnavailableError):
            engine.submit(EngineRequest(request_id="b", prompt=[5], params=SamplingParams()))
    finally:
        engine.close()


def test_an_engine_that_loses_a_rank_while_it_drains_goes_on_draining(model: Path) -> None:
    chosen = settings(model)
    engine = Engine(chosen, plan_layout(chosen))
    engine.start()
    try:
        engine.submit(EngineRequest(request_id="a", prompt=[5], params=SamplingParams(max_tokens=30)))
        engine.drain()
        os.kill(engine.executor.pids[0], signal.SIGKILL)
        while not engine.idle:
            engine.pump(1.0)
        assert (engine.state, engine.restarts) == ("draining", 1)
        with pytest.raises(UnavailableError, match="draining"):
            engine.submit(EngineRequest(request_id="b", prompt=[5], params=SamplingParams()))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"memory_fraction": 1e-7}, OutOfMemory), ({"kv_tokens": 10**12}, OutOfMemory), ({"start_timeout": 0.001}, RankFailure)],
)
def test_what_cannot_start_ends_cleanly(model: Path, changes: dict[str, float], kind: type[Exception]) -> None:
    chosen = settings(model, **changes)
    engine = Engine(chosen, plan_layout(chosen))
    with pytest.raises(kind):
        engine.start()
    assert engine.executor.pids == []


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelSettings(pipeline_parallel_size=9),
        ParallelSettings(pipeline_parallel_size=2, layer_split=(1, 1)),
        ParallelSettings(pipeline_parallel_size=2, executor="inline"),
        ParallelSettings(micro_batches=99),
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_starts(model: Path, parallel: ParallelSettings) -> None:
    from tandem.engine.build_layout import make_executor

    chosen = Settings(model=ModelSettings(model=str(model)), parallel=parallel)
    with pytest.raises(UsageError):
        make_executor(chosen, plan_layout(chosen))
