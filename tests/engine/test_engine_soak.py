"""Random requests over two ranks for each kind of cache, amid ends of ranks, aborts, preemptions and hits: as computed
alone; and what cannot start."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engines import settings_of
from scheduler_invariants import check_invariants
from tandem.engine.build_layout import make_executor, plan_layout
from tandem.engine.engine import Engine
from tandem.errors import OutOfMemory, RankFailure, UsageError
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest, SamplingParams
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow

COUNT, MANY, FEW_LIVE, PHASE = 60, 12, 3, 20
"""Many at once fill the KV cache, few leave room for prefixes: by turns of so many requests."""
KILLS = (signal.SIGKILL, signal.SIGTERM)
KINDS = ("gemma3_text", "deepseek_v3", "qwen3_next", "nemotron_h", "llama4")
"""A model of each kind: windows, a latent, the delta rule, Mamba 2, chunks."""
FEW = {11: 40.0, 12: 40.0, 13: 38.0, 14: 36.0}
"""Texts of few different tokens, in which n-grams come again."""


@contextmanager
def an_engine(model: Path, **options: Any) -> Iterator[Engine]:
    """Of whose ranks nothing is left."""
    settings = settings_of(model, prefill_chunk=24, self_check=False, max_restarts=10, **options)
    engine = Engine(settings, plan_layout(settings))
    engine.start()
    try:
        yield engine
    finally:
        pids = engine.executor.pids
        engine.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def requests(rng: random.Random) -> list[EngineRequest]:
    """Prompts of one to a hundred tokens, most of which begin like others, up to the end of a block."""
    stems = [[rng.randrange(3, 500) for _ in range(64)] for _ in range(2)]
    made = []
    for number in range(COUNT):
        params = SamplingParams(
            max_tokens=rng.choice([*range(1, 12), 30, 30]),
            ignore_eos=True,
            temperature=rng.choice([0.0, 0.0, 0.8]),
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 20]),
            seed=rng.randrange(2**40),
            stop_token_ids=tuple(rng.sample(range(3, 500), 20)) if rng.random() < 0.3 else (),
            logit_bias=FEW if rng.random() < 0.3 else {},
            repetition_penalty=rng.choice([1.0, 1.0, 1.1]),
            logprobs=rng.choice([None, None, 0, 3]),
        )
        stem = rng.choice(stems)[: rng.choice([0, 32, 64])]
        prompt = stem + [rng.randrange(3, 500) for _ in range(rng.randint(1, 31))]
        made.append(EngineRequest(request_id=f"r{number}", prompt=prompt, params=params))
    return made


def answers(
    engine: Engine,
    wanted: Sequence[EngineRequest],
    many: Sequence[int],
    rng: random.Random,
    kills: Sequence[signal.Signals] = (),
    abort_share: float = 0.0,
) -> dict[str, list[int]]:
    """Tokens of each request that was not aborted; so `many` at once by turns, which join and leave at any time, while
    ranks end by `kills`."""
    todo, left, live = list(wanted), list(kills), set[str]()
    got: dict[str, list[int]] = {}
    while todo or not engine.idle:
        while todo and len(live) < many[len(todo) // PHASE % len(many)]:
            engine.submit(todo[-1])
            live.add(todo[-1].request_id)
            got[todo.pop().request_id] = []
        if live and rng.random() < abort_share:
            name = rng.choice(sorted(live))
            live.remove(name)
            del got[name]
            assert engine.abort(name)
        for message in engine.pump(1.0):
            assert isinstance(message, Output), message
            if message.request_id in got:
                got[message.request_id] += message.tokens
                live -= {message.request_id} if message.finish_reason else set()
        if rng.random() < 0.02:
            engine.scheduler.batches.relieve()  # as when a device's memory is full: the youngest starts again
        check_invariants(engine.scheduler)
        if left and (len(wanted) - len(todo)) * (len(kills) + 1) >= len(wanted) * (len(kills) + 1 - len(left)):
            os.kill(rng.choice(engine.executor.pids), left.pop())
    assert not live
    return got


@pytest.mark.parametrize("family", KINDS)
def test_random_requests_are_answered_as_if_alone(family: str, tmp_path: Path) -> None:
    rng, model = random.Random(42), tiny_model(tmp_path, family)
    wanted = requests(rng)
    with an_engine(model, max_batch_size=1, prefix_cache=0.0) as engine:
        alone = answers(engine, wanted, [1], rng)
    with an_engine(model, pipeline_parallel_size=2, kv_tokens=600, prefix_cache=0.6, speculative_method="ngram") as engine:
        together = answers(engine, wanted, [FEW_LIVE, MANY], rng, KILLS, abort_share=0.02)
        for _ in range(100):  # what ranks say of their last step may come after its tokens
            if not any(rank.kv_bytes for rank in engine.status().ranks):
                break
            engine.pump(0.1)
        status, preemptions = engine.status(), engine.scheduler.batches.preemptions
    assert 0.7 * COUNT < len(together) < COUNT and together == {name: alone[name] for name in together}
    assert (status.restarts, preemptions > 0, status.prefix_hits > 5) == (len(KILLS), True, True)
    assert (status.speculation, status.accepted_tokens > 0) == ("ngram", True)
    assert (status.queued, status.running, status.kv_tokens_used) == (0, 0, 0)
    assert [rank.kv_bytes for rank in status.ranks] == [0, 0], "nothing is left"


@pytest.mark.parametrize(
    ("changes", "kind"),
    [({"max_memory": "1MB"}, OutOfMemory), ({"kv_tokens": 10**12}, OutOfMemory), ({"start_timeout": 0.001}, RankFailure)],
)
def test_what_cannot_start_ends_cleanly(model: Path, changes: dict[str, Any], kind: type[Exception]) -> None:
    settings = settings_of(model, pipeline_parallel_size=2, **changes)
    engine = Engine(settings, plan_layout(settings))
    with pytest.raises(kind):
        engine.start()
    assert engine.executor.pids == []


@pytest.mark.parametrize(
    "parallel",
    [
        {"pipeline_parallel_size": 9},
        {"pipeline_parallel_size": 2, "layer_split": (1, 1)},
        {"pipeline_parallel_size": 2, "executor": "inline"},
        {"micro_batches": 99},
    ],
)
def test_layouts_that_cannot_be_are_refused_before_anything_starts(model: Path, parallel: dict[str, object]) -> None:
    settings = settings_of(model, **parallel)
    with pytest.raises(UsageError):
        make_executor(settings, plan_layout(settings))
