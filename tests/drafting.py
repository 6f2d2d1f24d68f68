"""Prompts and answers by which tests compare an engine that drafts with one that does not."""

from __future__ import annotations

import random
from pathlib import Path

from tandem import LLM, SamplingParams

GREEDY = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(max_tokens=30, temperature=0.8, seed=3, ignore_eos=True, logprobs=0),
    SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True, frequency_penalty=0.3),
]


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(20, 500) for _ in range(length)] for length in (3, 70, 18, 1)]


def answers(llm: LLM) -> list[list[list[int]]]:
    return [[one.token_ids for one in llm.generate(prompts(), params)] for params in PARAMS]


def plain(directory: Path) -> list[list[list[int]]]:
    with LLM(str(directory), prefill_chunk=16, speculative_method="none") as llm:
        return answers(llm)
