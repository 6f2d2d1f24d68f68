"""Models with latents, states and chunks over two ranks: mlx-lm's own tokens, also with a prefix that was kept."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

PROMPTS = [[3 + (7 * i * i + 5 * i) % 290 for i in range(length)] for length in (5, 40, 17, 70)]
NEW = 8
KEPT = {"deepseek_v3": 32, "granitemoehybrid": 32, "qwen3_next": 32, "llama4": 32, "mamba2": 0}
"""Tokens of the second prompt that are not computed again; states alone are larger than the cache for prefixes."""


@pytest.mark.slow
@pytest.mark.parametrize("family", KEPT)
def test_two_ranks_give_the_tokens_of_mlx_lm(family: str, tmp_path: Path) -> None:
    path = tiny_model(tmp_path, family)
    whole, _ = load_model(path)
    whole.set_dtype(mx.float32)
    want = [[int(token) for token, _ in generate_step(mx.array(prompt), whole, max_tokens=NEW)] for prompt in PROMPTS]
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    with LLM(str(path), pipeline_parallel_size=2, prefill_chunk=16, prefix_cache=0.25, kv_tokens=2000) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == want
        again = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in again] == want
    assert again[1].cached_tokens == KEPT[family]
