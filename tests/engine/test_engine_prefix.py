"""Prefix caching in real layouts: hits are counted, and answers are mlx-lm's own, also of models with windows, latents,
states and chunks."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.utils import load_model

from submitted import ask, check
from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.testing import tiny_model

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=0)
KINDS = ("llama", "gemma3_text", "gpt_oss", "deepseek_v3", "granitemoehybrid", "qwen3_next", "llama4", "mamba2")
"""Of the last the states alone are larger than the cache for prefixes."""


def conversation() -> list[list[int]]:
    """Prompts that share a system prompt, then go on from one another."""
    rng = random.Random(3)

    def some(n: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(n)]

    system = some(130)
    first = system + some(20)
    return [first, first, system + some(33), first + some(40), system + some(7)]


@pytest.mark.slow
@pytest.mark.parametrize("family", KINDS)
def test_kept_prefixes_are_hit_and_change_nothing(tmp_path: Path, family: str) -> None:
    path = tiny_model(tmp_path, family)
    whole, _ = load_model(path)
    whole.set_dtype(mx.float32)
    with LLM(str(path), pipeline_parallel_size=2, prefill_chunk=64, prefix_cache=0.25, kv_tokens=3000) as llm:
        alone = [llm.generate([prompt], PARAMS)[0] for prompt in conversation()]
        status = ask(llm, Engine.status)
        together = llm.generate(conversation(), PARAMS)
    for prompt, *outputs in zip(conversation(), together, alone, strict=True):
        steps = list(generate_step(mx.array(prompt), whole, max_tokens=10))
        for output in outputs:
            assert output.token_ids == [int(token) for token, _ in steps]
            assert [one.logprob for one in output.logprobs] == pytest.approx(
                [float(row[int(token)]) for token, row in steps], abs=2e-4
            )
    kept = family != "mamba2"
    assert (status.prefix_queries, status.prefix_hits) == (5 * kept, 4 * kept)
    assert [one.cached_tokens for one in alone] == [0, *[128 * kept] * 4]
    states = family not in ("llama", "deepseek_v3")  # what stands beside the blocks does so at every second one of 32
    assert [one.cached_tokens for one in together] == [one * kept for one in (128, 128, *[128 if states else 160] * 2, 128)]


def test_kept_prefixes_give_way_to_running_requests(tmp_path: Path) -> None:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 500) for _ in range(96)] for _ in range(12)]
    with LLM(str(tiny_model(tmp_path)), kv_tokens=600, prefix_cache=0.5) as llm:
        for prompt in prompts:
            llm.generate([prompt], PARAMS)
            check(llm)
            assert ask(llm, Engine.status).prefix_tokens <= 300
        assert all(len(output.token_ids) == 10 for output in llm.generate(prompts, PARAMS))
        check(llm)
