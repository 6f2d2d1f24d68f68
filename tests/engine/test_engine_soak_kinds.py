"""200 random requests over two ranks for each kind of cache, amid kills, preemptions and hits: as computed alone."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from scheduler_invariants import check_invariants
from tandem.config.settings import ModelSettings, ParallelSettings, SchedulerSettings, Settings, SpeculationSettings
from tandem.engine.build_layout import plan_layout
from tandem.engine.engine import Engine
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow

COUNT, MANY, FEW_LIVE, PHASE, KILLS = 200, 12, 3, 50, 2
"""Many at once fill the KV cache, few leave room for prefixes: by turns of so many requests."""
STATES = "off: the model's recurrent states cannot take back drafts"
KINDS = {
    "deepseek_v3": "ngram",
    "qwen3_next": STATES,
    "nemotron_h": STATES,
    "llama4": "off: its masks are made for sequences of one length",
}
"""A model of each kind (a latent, the delta rule, Mamba 2, chunks), and whether it speculates: what `/model/info` says.
"""
FEW = {11: 40.0, 12: 40.0, 13: 38.0, 14: 36.0}
"""Texts of few different tokens, in which n-grams come again."""


@contextmanager
def an_engine(model: Path, parallel: ParallelSettings, speculation: SpeculationSettings, **scheduler: object) -> Iterator[Engine]:
    settings = Settings(
        model=ModelSettings(model=str(model)),
        parallel=parallel,
        speculation=speculation,
        scheduler=SchedulerSettings(prefill_chunk=24, self_check=False, max_restarts=10, **scheduler),
    )  # type: ignore[arg-type]
    engine = Engine(settings, plan_layout(settings))
    engine.start()
    try:
        yield engine
    finally:
        engine.close()


def requests(rng: random.Random) -> list[EngineRequest]:
    """Prompts of one to a hundred tokens, most of which begin like others, up to the end of a block."""
    stems = [[rng.randrange(3, 500) for _ in range(64)] for _ in range(2)]
    made = []
    for number in range(COUNT):
        params = SamplingParams(
            max_tokens=rng.choice([*range(1, 12), 30, 30]),
            ignore_eos=True,
            temperature=rng.choice([0.0, 0.0, 0.8]),
            seed=rng.randrange(2**40),
            logit_bias=FEW if rng.random() < 0.3 else {},
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
        )
        stem = rng.choice(stems)[: rng.choice([0, 32, 64])]
        prompt = stem + [rng.randrange(3, 500) for _ in range(rng.randint(1, 31))]
        made.append(EngineRequest(request_id=f"r{number}", prompt=prompt, params=params))
    return made


def answers(
    engine: Engine, wanted: Sequence[EngineRequest], live: Sequence[int], rng: random.Random, kill_at: Sequence[int] = ()
) -> dict[str, list[int]]:
    """Tokens of each request; `live` at once by turns, which join and leave at any time. A rank dies whenever so many
    were submitted as `kill_at` says."""
    todo, kills, open_ = list(wanted), list(kill_at), 0
    got: dict[str, list[int]] = {request.request_id: [] for request in wanted}
    while todo or not engine.idle:
        while todo and open_ < live[len(todo) // PHASE % len(live)]:
            engine.submit(todo.pop())
            open_ += 1
        for message in engine.pump(1.0):
            assert isinstance(message, Output), message
            got[message.request_id] += message.tokens
            open_ -= message.finish_reason is not None
        if rng.random() < 0.02:
            engine.scheduler.batches.relieve()  # as when a device's memory is full: the youngest starts again
        check_invariants(engine.scheduler)
        if kills and len(wanted) - len(todo) >= kills[0]:
            del kills[0]
            os.kill(rng.choice(engine.executor.pids), signal.SIGKILL)
    return got


@pytest.mark.parametrize("family", KINDS)
def test_200_requests_are_answered_as_if_alone(family: str, tmp_path: Path) -> None:
    rng, model = random.Random(42), tiny_model(tmp_path, family)
    wanted = requests(rng)
    with an_engine(model, ParallelSettings(), SpeculationSettings(), max_batch_size=1, prefix_cache=0.0) as engine:
        alone = answers(engine, wanted, [1], rng)
    drafts = SpeculationSettings(speculative_method="ngram" if KINDS[family] == "ngram" else "none")
    with an_engine(model, ParallelSettings(pipeline_parallel_size=2), drafts, kv_tokens=600, prefix_cache=0.6) as engine:
        kill_at = [COUNT * (i + 1) // (KILLS + 1) for i in range(KILLS)]
        together = answers(engine, wanted, [FEW_LIVE, MANY], rng, kill_at)
        for _ in range(100):  # what ranks say of their last step may come after its tokens
            if not any(rank.kv_bytes for rank in engine.status().ranks):
                break
            engine.pump(0.1)
        status, preemptions = engine.status(), engine.scheduler.batches.preemptions
    print("PREEMPTIONS", family, preemptions, flush=True)
    assert together == alone
    assert (status.restarts, preemptions > 0, status.prefix_hits > 5) == (KILLS, True, True)
    assert (status.speculation, status.accepted_tokens > 0) == (KINDS[family], KINDS[family] == "ngram")
    assert (status.kv_tokens_used, [rank.kv_bytes for rank in status.ranks]) == (0, [0, 0]), "nothing is left"
