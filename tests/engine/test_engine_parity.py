"""Every layout gives the tokens of mlx-lm's own single-process generation, whatever else is in the batch."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tandem import LLM, SamplingParams
from tandem.testing import tiny_model

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "mistral", "phi3"]
LAYOUTS = {
    "inline": {},
    "one rank": {"executor": "cluster"},
    "pp2 mlx": {"pipeline_parallel_size": 2, "channel": "mlx"},
    "pp3 tcp": {"pipeline_parallel_size": 3, "layer_split": (1, 2, 1), "channel": "tcp"},
    "pp3 mlx": {"pipeline_parallel_size": 3, "channel": "mlx", "micro_batches": 2},
    "tp3": {"tensor_parallel_size": 3},
    "tp2 pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "tp2,1": {"parallel": (2, 1)},
    "tp1,2": {"parallel": (1, 2), "layer_split": (3, 1)},
}
SOME = {"llama": tuple(LAYOUTS), "gpt_oss": ("inline", "tp3", "tp2,1")}
"""Llama tries all layouts: what passes between ranks knows of no family. The second has windows, experts and sums and a
link at once; tests/loading has each family in every way that it is cut, rank by rank."""
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
"""Three kv heads: two ranks share them 2 + 1."""
NEW = 12


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (1, 5, 17, 40, 61)]


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model") / request.param, request.param, config=HEADS)


@pytest.fixture(scope="module")
def reference(model: Path) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their log probabilities from mlx-lm's generate_step in float32."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step
    from mlx_lm.utils import load_model

    whole, _ = load_model(model)
    whole.set_dtype(mx.float32)
    answers = []
    for prompt in prompts():
        steps = list(generate_step(mx.array(prompt), whole, max_tokens=NEW))
        answers.append(([int(token) for token, _ in steps], [float(row[int(token)]) for token, row in steps]))
    return answers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "layout"), [(family, layout) for family in FAMILIES for layout in SOME.get(family, ("inline",))], indirect=["model"]
)
def test_greedy_tokens_and_logprobs_equal_mlx_lm(
    model: Path, reference: list[tuple[list[int], list[float]]], layout: str
) -> None:
    params = SamplingParams(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=2)
    with LLM(str(model), prefill_chunk=16, **LAYOUTS[layout]) as llm:
        outputs = llm.generate(prompts(), params)
    for output, (tokens, logprobs) in zip(outputs, reference, strict=True):
        assert output.token_ids == tokens
        assert output.finish_reason == "length"
        mine = [entry.logprob for entry in output.logprobs]
        assert mine == pytest.approx(logprobs, abs=2e-4)
        assert all(entry.top[0] == (entry.token, entry.logprob) for entry in output.logprobs)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = tiny_model(tmp_path_factory.mktemp("model"), "llama")
    with LLM(str(directory), prefill_chunk=16) as one:
        yield one


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=20, temperature=0.0),
        SamplingParams(max_tokens=20, temperature=0.9, seed=1),
        SamplingParams(max_tokens=20, temperature=1.5, top_p=0.9, top_k=30, seed=2),
        SamplingParams(max_tokens=20, temperature=1.0, min_p=0.05, seed=3, repetition_penalty=1.2, frequency_penalty=0.5),
    ],
    ids=["greedy", "temperature", "filters", "penalties"],
)
def test_the_rest_of_the_batch_never_changes_a_requests_tokens(llm: LLM, params: SamplingParams) -> None:
    alone = [llm.generate([prompt], params)[0].token_ids for prompt in prompts()]
    together = [output.token_ids for output in llm.generate(prompts(), params)]
    assert together == alone
    crowd = llm.generate([*prompts(), *reversed(prompts())], params)
    assert [output.token_ids for output in crowd] == [*alone, *reversed(alone)]


def test_different_seeds_give_different_texts_and_no_seed_a_new_one_each_time(llm: LLM) -> None:
    def run(seed: int | None) -> list[int]:
        return llm.generate([prompts()[2]], SamplingParams(max_tokens=20, temperature=1.0, seed=seed))[0].token_ids

    assert run(1) != run(2)
    assert run(None) != run(None)


def test_text_stop_strings_and_streaming_agree(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    whole = llm.generate("hello there", params)[0].text
    assert "".join(llm.stream("hello there", params)) == whole
    middle = whole[len(whole) // 2 :][:2]
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, stop=(middle,))
    cut = llm.generate("hello there", params)[0]
    assert cut.text == whole[: whole.index(middle)] and cut.finish_reason == "stop"


def test_a_stream_that_is_dropped_frees_its_place(llm: LLM) -> None:
    stream = llm.stream("hello", SamplingParams(max_tokens=400, ignore_eos=True, temperature=0.0))
    next(stream)
    stream.close()
    llm.generate("after", SamplingParams(max_tokens=2))
    assert llm.engine.scheduler.batches.running == 0
