"""Prefix caching in real layouts: hits are counted, and answers are those of a cold start."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from submitted import ask, check
from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.testing import tiny_model

PARAMS = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=0)


def conversation() -> list[list[int]]:
    """Prompts that share a system prompt, then go on from one another."""
    rng = random.Random(3)

    def some(n: int) -> list[int]:
        return [rng.randrange(3, 500) for _ in range(n)]

    system = some(130)
    first = system + some(20)
    return [first, first, system + some(33), first + some(40), system + some(7)]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("layout", [{}, {"pipeline_parallel_size": 2}], ids=["inline", "pp2"])
def test_kept_prefixes_are_hit_and_change_nothing(tmp_path: Path, family: str, layout: dict[str, int]) -> None:
    directory = str(tiny_model(tmp_path, family))
    with LLM(directory, prefill_chunk=64, prefix_cache=0.0, **layout) as cold:
        expected = [cold.generate([prompt], PARAMS)[0] for prompt in conversation()]
        assert ask(cold, Engine.status).prefix_hits == 0
    with LLM(directory, prefill_chunk=64, **layout) as warm:
        got = [warm.generate([prompt], PARAMS)[0] for prompt in conversation()]
        status = ask(warm, Engine.status)
    assert [output.token_ids for output in got] == [output.token_ids for output in expected]
    for mine, theirs in zip(got, expected, strict=True):
        assert [e.logprob for e in mine.logprobs] == pytest.approx([e.logprob for e in theirs.logprobs], abs=1e-4)
    assert (status.prefix_queries, status.prefix_hits) == (5, 4)
    assert [output.cached_tokens for output in got][:2] == [0, 128]


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
