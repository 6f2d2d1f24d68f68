"""Rows with a grammar among others, sampled ahead as plans do: nobody reads a token before the next step is built."""

from __future__ import annotations

import re
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from tandem.checkpoints.files import ModelFiles
from tandem.guided.vocabulary import Vocabulary
from tandem.protocol.request import SamplingParams, StructuredOutputs
from tandem.protocol.step import NO_CONTINUATION
from tandem.runner.sampler import Sampler
from tandem.testing import EOS, write_tokenizer
from tandem.text.tokenizer import Tokenizer, load_tokenizer

VOCAB = 512
DATE = "[0-9]{4}-[0-9]{2}"
GUIDED = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, structured_outputs=StructuredOutputs(regex=DATE))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path, VOCAB)
    return load_tokenizer(ModelFiles(path, "tiny"))


@pytest.fixture
def sampler(tokenizer: Tokenizer) -> Sampler:
    return Sampler(VOCAB, (EOS,), Vocabulary(lambda: tokenizer, VOCAB, (EOS,)))


def logits(steps: int, rows: int) -> list[mx.array]:
    rng = np.random.default_rng(4)
    return [mx.array(rng.normal(size=(rows, VOCAB)).astype(np.float32)) for _ in range(steps)]


def texts(tokenizer: Tokenizer, steps: list[mx.array]) -> list[str]:
    rows = np.array([step.tolist() for step in steps]).T.tolist()
    return [tokenizer.decode(row[: row.index(EOS)]) if EOS in row else "" for row in rows]


def test_guided_rows_match_and_leave_the_others_alone(sampler: Sampler, tokenizer: Tokenizer) -> None:
    plain = SamplingParams(temperature=1.0, logprobs=2)
    alone = Sampler(VOCAB, (EOS,))
    alone.add("plain", plain, 5, [1], 1)
    for name, params in (("a", GUIDED), ("plain", plain), ("b", GUIDED)):
        sampler.add(name, params, 5 if name == "plain" else hash(name) % 1000, [1], 1)
    given = logits(12, 3)
    sampled = [sampler.sample(step, ["a", "plain", "b"]) for step in given]
    tokens = [step.tokens for step in sampled]
    a, _, b = texts(tokenizer, tokens)
    assert re.fullmatch(DATE, a) and re.fullmatch(DATE, b)
    expected = [alone.sample(step[1:2], ["plain"]) for step in given]
    assert [step.tolist()[1] for step in tokens] == [one.tokens.item() for one in expected]
    assert [one.logprobs()["plain"] for one in sampled] == [one.logprobs()["plain"] for one in expected]


def test_a_sequence_may_leave_and_come_back(sampler: Sampler, tokenizer: Tokenizer) -> None:
    given = logits(12, 1)
    sampler.add("a", GUIDED, 9, [1, 1], 2)
    whole = [sampler.sample(step, ["a"]).tokens for step in given]
    for cut in (0, 1, 4, 7):
        sampler.remove("a")
        sampler.add("a", GUIDED, 9, [1, 1, *(int(token.item()) for token in whole[:cut])], 2)
        rest = [sampler.sample(step, ["a"]).tokens for step in given[cut:]]
        assert texts(tokenizer, [*whole[:cut], *rest]) == texts(tokenizer, whole)


def test_log_probabilities_are_of_what_the_grammar_allows(sampler: Sampler, tokenizer: Tokenizer) -> None:
    params = SamplingParams(temperature=0.0, logprobs=5, structured_outputs=StructuredOutputs(choice=("0", "1")))
    sampler.add("a", params, 0, [1], 1)
    [entry] = sampler.sample(logits(1, 1)[0], ["a"]).logprobs()["a"]
    assert {token for token, _ in entry.top} == {*tokenizer.encode("0"), *tokenizer.encode("1")}
    assert sum(np.exp(logprob) for _, logprob in entry.top) == pytest.approx(1.0)


def test_a_grammar_that_is_given_up_is_said_so(sampler: Sampler) -> None:
    sampler.add("a", SamplingParams(temperature=0.0), 0, [1], 1)
    sampler.add("b", GUIDED, 0, [1, 400], 1)
    tokens = [sampler.sample(step, ["a", "b"]).tokens.tolist() for step in logits(2, 2)]
    assert tokens[0][1] == NO_CONTINUATION
    assert min(tokens[0][0], tokens[1][0]) >= 0


def test_without_a_vocabulary_there_are_no_grammars() -> None:
    with pytest.raises(ValueError, match="vocabulary"):
        Sampler(VOCAB, (EOS,)).add("a", GUIDED, 0, [1], 1)
