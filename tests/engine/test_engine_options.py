"""Options that change what is computed at once, and no token: fused projections, chunks of prompts by time."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from submitted import ask, check
from tandem import LLM, SamplingParams
from tandem.errors import ConfigError, UsageError
from tandem.testing import tiny_model

PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (7 * i * i + 5 * i) % 290 for i in range(length)] for length in (9, 700, 40, 300)]
LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
OPTIONS: dict[str, dict[str, Any]] = {
    "fused": {"fuse_projections": "on"},
    "fused, packed, with drafts": {"fuse_projections": "on", "dequantize": "no", "speculative_method": "ngram"},
    "fused, layout": {"fuse_projections": "on", **LAYOUT},
    "chunks by time": {"fuse_projections": "off", "prefill_time_ms": None},
    "short chunks": {"prefill_time_ms": 0.01},
    "short chunks, layout": {"prefill_time_ms": 0.01, **LAYOUT},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("options") / "model", quantized=True, config={"max_position_embeddings": 2048}))


def tokens(model: str, *, prefill_time_ms: float | None = 0, **options: Any) -> list[list[int]]:
    with LLM(model, prefill_chunk=256, prefix_cache=0.0, prefill_time_ms=prefill_time_ms, **options) as llm:
        found = [list(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)]
        limit = None if prefill_time_ms is None else prefill_time_ms / 1000
        assert ask(llm, lambda engine: engine.scheduler.limits.prefill_time_s) == limit
        check(llm)
        return found


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    return tokens(model)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if "layout" in name else name for name in OPTIONS])
def test_the_same_tokens(name: str, model: str, expected: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "tandem"):
        assert tokens(model, **OPTIONS[name]) == expected
    if (fuse := OPTIONS[name].get("fuse_projections")) and "layout" not in name:  # a rank of its own says it elsewhere
        assert ("Fused projections of the same input" in caplog.text) == (fuse == "on")


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [({"fuse_projections": "maybe"}, UsageError, "fuse"), ({"prefill_time_ms": -1}, ConfigError, "prefill.time.ms")],
)
def test_other_values_are_refused(model: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        LLM(model, **options)
