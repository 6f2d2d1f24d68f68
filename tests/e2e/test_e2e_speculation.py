"""`tandem serve` with speculative decoding, over HTTP: answers are those of plain decoding in one process."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from served import served
from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

pytestmark = pytest.mark.slow
FEW = {11: 40.0, 12: 40.0, 13: 38.0}
"""Texts of three tokens: about half of what stood before comes again."""
TOKENS = 120
SAMPLINGS = ({"temperature": 0.0, "seed": 1}, {"temperature": 0.7, "seed": 5})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / "tiny", layers=2)


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[str]]:
    with LLM(str(model)) as llm:
        params = [SamplingParams(max_tokens=TOKENS, ignore_eos=True, logit_bias=FEW, **one) for one in SAMPLINGS]
        return [[output.text for output in llm.generate(prompts(), one)] for one in params]


@pytest.fixture
def url(model: Path) -> Iterator[str]:
    """Two replicas of two stages; tests/engine/test_engine_speculation.py has the other layouts."""
    config = '{"method": "ngram", "num_speculative_tokens": 4}'
    with served(str(model), "-dp", "2", "-pp", "2", "--speculative-config", config) as address:
        yield address


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (3, 40, 18)]


def test_streams_and_whole_answers_are_those_of_plain_decoding(url: str, expected: list[list[str]]) -> None:
    with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=240) as client:

        def ask(prompt: list[int], sampling: dict[str, float], stream: bool) -> str:
            answer = client.completions.create(  # type: ignore[call-overload]
                model="default",
                prompt=prompt,
                max_tokens=TOKENS,
                stream=stream,
                extra_body={"ignore_eos": True},
                logit_bias={str(token): bias for token, bias in FEW.items()},
                **sampling,
            )
            if stream:
                return "".join(chunk.choices[0].text for chunk in answer if chunk.choices)
            assert answer.usage.completion_tokens == TOKENS
            return str(answer.choices[0].text)

        for sampling, texts in zip(SAMPLINGS, expected, strict=True):
            with ThreadPoolExecutor(len(texts)) as pool:
                for stream in (False, True):
                    assert list(pool.map(partial(ask, sampling=sampling, stream=stream), prompts())) == texts
    metrics = httpx.get(f"{url}/metrics", timeout=240).text
    accepted, drafts = (
        sum(map(float, re.findall(rf"^tandem_spec_decode_num_{name}_tokens_total\S* (\S+)$", metrics, re.M)))
        for name in ("accepted", "draft")
    )
    assert 0 < accepted <= drafts  # how many depends on what steps take
    engine = httpx.get(f"{url}/v1/status", timeout=240).json()["engine"]
    assert 0 < engine["accepted_tokens"] < engine["draft_tokens"] <= drafts, "as the engine last published it"
