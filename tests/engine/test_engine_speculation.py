"""Speculative decoding in real layouts: the outputs are those of plain decoding, and drafts are accepted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from submitted import Killer, ask, check, submitted
from tandem import LLM, SamplingParams
from tandem.engine.engine import Engine
from tandem.errors import ConfigError, UnsupportedModel
from tandem.protocol.request import EngineRequest
from tandem.runner.drafter import Drafter
from tandem.runner.runner import Runner
from tandem.testing import tiny_model

pytestmark = pytest.mark.usefixtures("steps_that_cost_alike")
NGRAM = {"speculative_method": "ngram", "num_speculative_tokens": 4}
LAYOUTS = {"inline": {}, "pp2": {"pipeline_parallel_size": 2}, "tp2": {"tensor_parallel_size": 2}, "tp2,1": {"parallel": (2, 1)}}
MODELS = [("llama", layout) for layout in LAYOUTS] + [("gpt_oss", "inline"), ("gpt_oss", "pp2"), ("qwen3_next", "pp2")]
"""Windows in two of them, states in one; tests/runner has more."""
NEW = 150
FEW = {11: 40.0, 12: 40.0, 13: 38.0, 2: 35.0}
"""Texts of few different tokens, 2 being the end: about half of what stood before comes again."""
PARAMS = {
    # Not longer: in the 64th token of one answer of gpt_oss two experts lie 4e-6 apart, which any order of sums tips.
    "free": SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True),
    "greedy": SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=1, logit_bias=FEW),
    "drawn": SamplingParams(max_tokens=NEW, temperature=0.7, seed=3, min_tokens=NEW // 2, logprobs=0, logit_bias=FEW),
    "penalised": SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True, frequency_penalty=0.3),
}


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (3, 40, 18)]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    layers = 2 if request.param == "llama" else 4
    return tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param, layers=layers)


@pytest.fixture(scope="module")
def expected(model: Path) -> dict[str, list[list[int]]]:
    with LLM(str(model), prefill_chunk=16) as llm:
        return {name: [one.token_ids for one in llm.generate(prompts(), params)] for name, params in PARAMS.items()}


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), MODELS, indirect=["model"])
def test_every_layout_gives_the_tokens_of_plain_decoding(model: Path, expected: dict[str, list[list[int]]], layout: str) -> None:
    with LLM(str(model), prefill_chunk=16, **NGRAM, **LAYOUTS[layout]) as llm:
        for name, params in PARAMS.items():
            outputs = llm.generate(prompts(), params)
            assert [one.token_ids for one in outputs] == expected[name], name
            if params.logprobs is not None:
                assert all([e.token for e in one.logprobs] == one.token_ids for one in outputs)
        status = ask(llm, Engine.status)
        assert 50 < status.accepted_tokens <= status.draft_tokens
        assert f"tandem_spec_decode_num_accepted_tokens_total {status.accepted_tokens}" in (llm.engine.metrics.text().decode())


@pytest.mark.slow
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_rank_that_dies_between_drafts_changes_nothing(model: Path, expected: dict[str, list[list[int]]]) -> None:
    with LLM(str(model), pipeline_parallel_size=2, **NGRAM) as llm:
        tokens: dict[str, list[int]] = {}
        requests = [
            EngineRequest(request_id=str(i), prompt=prompt, params=PARAMS["greedy"]) for i, prompt in enumerate(prompts())
        ]
        for message in submitted(llm, requests, Killer(llm, lambda _: llm.engine.status().accepted_tokens > 40)):
            tokens.setdefault(message.request_id, []).extend(message.tokens)
        assert llm.engine.restarts == 1
        assert [tokens[str(i)] for i in range(3)] == expected["greedy"]


def test_a_full_kv_cache_preempts_and_changes_nothing(tmp_path: Path) -> None:
    directory = str(tiny_model(tmp_path))
    params = PARAMS["greedy"]
    with LLM(directory) as llm:
        alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts()]
    with LLM(directory, kv_tokens=450, **NGRAM) as llm:
        assert [one.token_ids for one in llm.generate(prompts(), params)] == alone
        check(llm)
        assert llm.engine.scheduler.batches.preemptions > 0
        assert ask(llm, Engine.status).accepted_tokens > 0


def test_stop_strings_end_the_output_where_they_do_one_token_at_a_time(tmp_path: Path) -> None:
    directory = str(tiny_model(tmp_path))
    with LLM(directory) as plain, LLM(directory, **NGRAM) as speculating:
        whole = plain.generate([prompts()[0]], PARAMS["greedy"])[0].text
        params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, stop=(whole[-40:-36],))
        for _ in range(2):
            one, two = (llm.generate([prompts()[0]], params)[0] for llm in (plain, speculating))
            assert (one.text, one.token_ids, one.finish_reason) == (two.text, two.token_ids, two.finish_reason)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "layout"), [("llama", "pp2"), ("llama", "tp2"), ("gpt_oss", "inline")], indirect=["model"])
def test_a_draft_model_changes_nothing_and_is_right_where_it_is_the_model_itself(
    model: Path, expected: dict[str, list[list[int]]], layout: str
) -> None:
    with LLM(str(model), draft_model=str(model), num_speculative_tokens=4, prefill_chunk=16, **LAYOUTS[layout]) as llm:
        for name, params in PARAMS.items():
            assert [one.token_ids for one in llm.generate(prompts(), params)] == expected[name], name
            if name == "free":
                status = ask(llm, Engine.status)
                assert 20 < 0.95 * status.draft_tokens < status.accepted_tokens


def test_a_draft_model_reads_prompts_and_cached_prefixes_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, steps = str(tiny_model(tmp_path / "a", layers=1, config={"max_position_embeddings": 1024})), [0]
    forward, execute = Drafter._forward, Runner.execute

    def fed(drafter: Drafter, tokens: mx.array, *others: Any) -> mx.array:
        steps[-1] += tokens.size
        return forward(drafter, tokens, *others)

    def started(*given: Any) -> Any:
        steps.append(0)
        return execute(*given)

    monkeypatch.setattr(Drafter, "_forward", fed)
    monkeypatch.setattr(Runner, "execute", started)
    monkeypatch.setattr("tandem.runner.drafter.CHUNK", 100)
    prompt, params = [random.Random(3).randrange(3, 500) for _ in range(700)], PARAMS["free"]
    with LLM(directory, draft_model=directory, num_speculative_tokens=4, prefill_chunk=64, self_check=False) as llm:
        first, again = (llm.generate([prompt], params)[0] for _ in range(2))
        status = ask(llm, Engine.status)
    assert first.token_ids == again.token_ids and again.cached_tokens >= 672
    assert sum(steps) > 1400 and max(steps) <= 64 + 100, "no step reads a whole prompt"
    assert 20 < 0.9 * status.draft_tokens < status.accepted_tokens


def test_a_draft_model_that_knows_nothing_is_given_up(tmp_path: Path) -> None:
    directory, other = str(tiny_model(tmp_path / "a")), str(tiny_model(tmp_path / "b", "qwen3", layers=2, seed=9))
    params = SamplingParams(max_tokens=NEW, temperature=0.9, seed=5, ignore_eos=True)
    with LLM(directory) as llm:
        plain = [one.token_ids for one in llm.generate(prompts(), params)]
    with LLM(directory, draft_model=other) as llm:
        assert [one.token_ids for one in llm.generate(prompts(), params)] == plain
        status = ask(llm, Engine.status)
        assert 0 < status.draft_tokens < 400 and status.accepted_tokens < 0.3 * status.draft_tokens
        assert ask(llm, Engine.status).ranks[0].weight_bytes > 0


def test_a_draft_model_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another tokenizer"):
        LLM(str(tiny_model(tmp_path / "a")), draft_model=str(tiny_model(tmp_path / "b", vocab=400)))


def test_a_draft_model_that_is_not_computed_in_batches_is_refused(tmp_path: Path) -> None:
    directory = str(tiny_model(tmp_path, "gemma3n", layers=4))
    with pytest.raises(UnsupportedModel, match="the draft model decodes its sequences one by one, as layers that share keys"):
        LLM(directory, draft_model=directory)
