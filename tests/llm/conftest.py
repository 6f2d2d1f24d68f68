"""Models that the tests of the Python API share, and what must be true when a test is over."""

from __future__ import annotations

import time
from collections.abc import Iterator

import mlx.core as mx
import pytest

from submitted import ask
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

BROKEN = 400
LAYOUTS = {"inline": {}, "pp2": {"pipeline_parallel_size": 2, "self_check": False}}  # whose prompts have all tokens


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model for long texts; a prompt with token `BROKEN` gives logits that are not finite."""
    path = tiny_model(
        tmp_path_factory.mktemp("llm") / "tiny", config={"max_position_embeddings": 100_000, "tie_word_embeddings": False}
    )
    weights = mx.load(str(path / "model.safetensors"))
    weights["model.embed_tokens.weight"][BROKEN] = float("nan")
    mx.save_safetensors(str(path / "model.safetensors"), weights, {"format": "mlx"})
    return str(path)


@pytest.fixture(scope="module", params=[pytest.param("inline"), pytest.param("pp2", marks=pytest.mark.slow)])
def shared(tiny: str, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(tiny, kv_tokens=300_000, log_level="WARNING", **LAYOUTS[request.param]) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """One that does nothing before a test, and nothing after it."""
    assert live(shared) == 0
    yield shared
    eventually_idle(shared)


def live(llm: LLM) -> int:
    """Requests in the engine."""
    return ask(llm, lambda engine: len(engine.scheduler.sequences))


def eventually_idle(llm: LLM) -> None:
    """What was aborted in another thread leaves with the next step; far sooner than it would end by itself."""
    deadline = time.monotonic() + 240
    while live(llm):
        assert time.monotonic() < deadline, "something is left running"
        time.sleep(0.01)


def greedy(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True, logit_bias={BROKEN: -100.0})


ENDLESS = greedy(60_000)
"""Takes longer than any test waits."""
