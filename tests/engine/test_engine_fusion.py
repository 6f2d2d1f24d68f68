"""Fused projections as served: the same tokens in every layout, with speculation and with packed weights."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tandem import LLM, SamplingParams
from tandem.errors import UsageError
from tandem.testing import tiny_model

PARAMS = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
PROMPTS = [[3 + (7 * i * i + 5 * i) % 290 for i in range(length)] for length in (9, 40, 70)]
SAID = "Fused projections of the same input"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("fusion") / "model", quantized=True))


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    return tokens(model)


def tokens(model: str, **options: Any) -> list[list[int]]:
    with LLM(model, **options) as llm:
        return [list(one.token_ids) for one in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("options", [{}, {"dequantize": "no", "speculative_method": "ngram"}], ids=["plain", "drafts"])
def test_the_same_tokens(options, model, expected, caplog):
    with caplog.at_level(logging.INFO, "tandem"):
        assert tokens(model, fuse_projections="on", **options) == expected
    assert SAID in caplog.text


def test_off_fuses_nothing(model, expected, caplog):
    with caplog.at_level(logging.INFO, "tandem"):
        assert tokens(model, fuse_projections="off") == expected
    assert SAID not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("layout", [{"tensor_parallel_size": 2, "pipeline_parallel_size": 2}])
def test_layouts_say_the_same(layout, model, expected):
    assert tokens(model, fuse_projections="on", **layout) == expected


def test_another_word_is_refused(model: str) -> None:
    with pytest.raises(UsageError, match="fuse"):
        LLM(model, fuse_projections="maybe")
