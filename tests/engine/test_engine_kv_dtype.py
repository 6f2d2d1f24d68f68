"""Quantised KV: the same tokens in every layout, whatever else is on, and never mixed up with another type."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from served import wait_until
from submitted import ask, check
from tandem import LLM, SamplingParams
from tandem.errors import UnsupportedModel
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE
from tandem.testing import tiny_model

PARAMS = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True, logprobs=0)
KIND: dict[str, Any] = {"layers": 4, "dtype": "float32", "config": {"max_position_embeddings": 1024, "head_dim": 32}}
PROMPTS = [[random.Random(length).randrange(3, 500) for _ in range(length)] for length in (5, 70, DISK_BLOCK_SIZE + 30, 33)]
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2},
    "tp2": {"tensor_parallel_size": 2},
    "pp3": {"pipeline_parallel_size": 3, "layer_split": (1, 2, 1)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_model(tmp_path_factory.mktemp("kv") / "model", **KIND))


@pytest.fixture(scope="module")
def expected(model: str) -> Any:
    """One sequence after the other, so that none has a neighbour."""
    with LLM(model, kv_dtype="8bit", prefill_chunk=64, prefix_cache=0.0) as llm:
        return [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]


def same(llm: LLM, expected: Any) -> list[int]:
    """All at once: they join and leave the batch as their prompts are done; returns what came from cached prefixes."""
    got = llm.generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in got] == [one.token_ids for one in expected]
    check(llm)
    return [one.cached_tokens for one in got]


@pytest.mark.parametrize("layout", [pytest.param(name, marks=pytest.mark.slow) for name in LAYOUTS])
def test_layouts_say_the_same(layout, model, expected, tmp_path):
    with LLM(model, kv_dtype="8bit", prefill_chunk=64, kv_disk=str(tmp_path / "kv"), **LAYOUTS[layout]) as llm:
        assert same(llm, expected) == [0, 0, 0, 0]
        assert same(llm, expected)[2] >= DISK_BLOCK_SIZE  # from memory
        status = ask(llm, lambda engine: engine.status())
        assert (status.kv_dtype, status.kv_bytes_per_token) == ("8bit in layers 0-3", 640)


def test_log_probabilities_are_near_those_of_the_full_type(model, expected):
    with LLM(model, prefill_chunk=64) as llm:
        full = [llm.generate([prompt], PARAMS)[0] for prompt in PROMPTS]
        assert ask(llm, lambda engine: engine.status()).kv_bytes_per_token == 2048
    firsts = [(mine.logprobs[0], theirs.logprobs[0]) for mine, theirs in zip(expected, full, strict=True)]
    off = [abs(mine.logprob - theirs.logprob) for mine, theirs in firsts if mine.token == theirs.token]
    assert off and 0 < max(off) < 0.5


def test_a_batch_that_is_preempted_and_one_with_drafts(model, expected):
    many = [[random.Random(number).randrange(3, 500) for _ in range(60)] for number in range(6)]
    params = SamplingParams(max_tokens=90, temperature=0.0, ignore_eos=True)
    with LLM(model, kv_dtype="8bit", prefill_chunk=16, kv_tokens=440, max_batch_size=4, prefix_cache=0.0) as llm:
        found = llm.generate(many, params)
        assert ask(llm, lambda engine: engine.scheduler.batches.preemptions) > 0
    with LLM(model, kv_dtype="8bit", prefix_cache=0.0) as llm:
        assert [one.token_ids for one in llm.generate(many, params)] == [one.token_ids for one in found]
    with LLM(model, kv_dtype="8bit", prefill_chunk=64, speculative_method="ngram", prompt_lookup_min=1) as llm:
        same(llm, expected)


def test_a_prefix_on_disk_is_found_by_its_own_type_alone(model, expected, tmp_path):
    disk: dict[str, Any] = {"kv_disk": str(tmp_path / "kv"), "prefill_chunk": 64}

    def kept(kv_dtype: str) -> int:
        """How much of the prompt comes from disk; leaves it there."""
        with LLM(model, kv_dtype=kv_dtype, **disk) as llm:
            [got] = llm.generate([PROMPTS[2]], PARAMS)
            if kv_dtype == "8bit":
                assert got.token_ids == expected[2].token_ids
            kind = "" if kv_dtype == "auto" else kv_dtype
            wait_until(lambda: list((tmp_path / "kv").glob(f"*{kind}/*.kv")))
            return int(got.cached_tokens)

    assert [kept(kind) for kind in ("8bit", "auto", "4bit")] == [0, 0, 0]
    assert [kept(kind) for kind in ("8bit", "auto", "4bit")] == [DISK_BLOCK_SIZE] * 3
    sizes = {path.parent.name.rpartition("-")[2]: path.stat().st_size for path in Path(tmp_path).glob("kv/*/*.kv")}
    assert sizes["4bit"] < sizes["8bit"] < sizes["float32"] / 3


@pytest.mark.parametrize(
    ("family", "config", "words"),
    [
        ("deepseek_v3", {}, "deepseek_v3 has no layer that it would change"),
        ("gemma2", {"head_dim": 64}, "computes with keys and values itself"),
        ("recurrent_gemma", {}, "recurrent_gemma has no layer"),
    ],
)
def test_what_it_does_not_work_with_is_refused(family, config, words, tmp_path):
    directory = str(tiny_model(tmp_path, family, config=config))
    with pytest.raises(UnsupportedModel, match=f"--kv-dtype 4bit: .*{words}"):
        LLM(directory, kv_dtype="4bit")
