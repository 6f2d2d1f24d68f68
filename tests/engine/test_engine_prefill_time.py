"""Chunks by time as served: whatever their sizes turn out to be, tokens are the same, in layouts too."""

from __future__ import annotations

from typing import Any

import pytest

from submitted import ask, check
from tandem import LLM, SamplingParams
from tandem.errors import ConfigError
from tandem.testing import tiny_model

PROMPTS = [[3 + (7 * i * i + 5 * i) % 290 for i in range(length)] for length in (9, 700, 40, 300)]
PARAMS = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("pace") / "model", dtype="float32", config={"max_position_embeddings": 2048}))


def tokens(model: str, seconds: float | None, **options: Any) -> list[list[int]]:
    with LLM(model, prefill_chunk=256, prefix_cache=0.0, **options) as llm:
        found = [list(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)]
        assert ask(llm, lambda engine: engine.scheduler.limits.prefill_time_s) == seconds
        check(llm)
        return found


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    return tokens(model, 0.0, prefill_time_ms=0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_time_ms": 0.01},
        pytest.param({"prefill_time_ms": 0.01, "pipeline_parallel_size": 2, "tensor_parallel_size": 2}, marks=pytest.mark.slow),
    ],
    ids=["default", "short", "layout"],
)
def test_the_same_tokens(options: dict[str, Any], model: str, expected: list[list[int]]) -> None:
    seconds = options["prefill_time_ms"] / 1000 if options else None
    assert tokens(model, seconds, **options) == expected


def test_a_time_below_zero_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="prefill.time.ms"):
        LLM(model, prefill_time_ms=-1)
