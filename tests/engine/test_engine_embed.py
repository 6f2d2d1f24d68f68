"""Every layout gives the hidden states of mlx-lm's own model, pooled, whatever else is in the batch."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.utils import load_model

from submitted import Killer, ask, check, submitted
from tandem import LLM, SamplingParams
from tandem.errors import RequestError
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest
from tandem.testing import tiny_model

LAYOUTS = {
    "inline": {},
    "pp2, speculating": {"pipeline_parallel_size": 2, "speculative_method": "ngram"},
    "tp2 uneven": {"tensor_parallel_size": 2},
    "tp1,2": {"parallel": (1, 2), "layer_split": (3, 1)},
}
HEADS = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
"""Three kv heads: two ranks share them 2 + 1."""
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (1, 5, 17, 40, 97)]


def reference(model: Path, pooling: str, texts: list[list[int]]) -> list[list[float]]:
    """From mlx-lm's own model in float32: final hidden states of the whole prompt at once."""
    whole, _ = load_model(model)
    whole.set_dtype(mx.float32)
    vectors = []
    for tokens in texts:
        states = np.array(whole.model(mx.array([tokens]))[0])
        vector = states[-1] if pooling == "last" else states.mean(axis=0)
        vectors.append((vector / np.linalg.norm(vector)).tolist())
    return vectors


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", config=HEADS)


def near(vectors: list[list[float]]) -> list[object]:
    return [pytest.approx(vector, abs=2e-5) for vector in vectors]


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), prefill_chunk=16, **LAYOUTS[request.param]) as one:
        yield one


@pytest.mark.slow
def test_vectors_equal_mlx_lms_and_leave_generation_alone(llm: LLM, model: Path) -> None:
    alone = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    last, mean = (near(reference(model, pooling, prompts())) for pooling in ("last", "mean"))
    assert llm.embed(prompts()) == last
    assert both(llm, "last") == (last, alone)
    assert both(llm, "mean") == (mean, alone)
    check(llm)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_texts_that_share_a_pass(llm: LLM, model: Path, pooling: Any) -> None:
    rng = random.Random(2)
    texts = [[rng.randrange(3, 500) for _ in range(rng.choice((3, 4, 5, 12, 13)))] for _ in range(24)]
    asked = [embedding(f"v{i}", text, pooling) for i, text in enumerate(texts)]
    vectors = {message.request_id: unit(message) for message in submitted(llm, asked)}
    assert [vectors[f"v{i}"] for i in range(len(texts))] == near(reference(model, pooling, texts))


@pytest.mark.slow
def test_a_ranks_death_is_not_seen(llm: LLM, model: Path) -> None:
    if len(llm.engine.executor.pids) != 2:
        pytest.skip("for layouts of two processes")
    rng = random.Random(1)
    texts = [[rng.randrange(3, 500) for _ in range(400)] for _ in range(3)]
    asked = [embedding(f"v{i}", text, "mean") for i, text in enumerate(texts)]
    vectors = {message.request_id: unit(message) for message in submitted(llm, asked, Killer(llm))}
    assert llm.engine.restarts == 1
    assert [vectors[f"v{i}"] for i in range(len(texts))] == near(reference(model, "mean", texts))


def embedding(name: str, tokens: list[int], pooling: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tokens, params=SamplingParams(max_tokens=0), pooling=pooling)


def unit(message: object) -> list[float]:
    assert isinstance(message, Output)
    values = np.frombuffer(message.vector, "<f4")
    return list(map(float, values / np.linalg.norm(values)))


def both(llm: LLM, pooling: str) -> tuple[list[list[float]], list[list[int]]]:
    """Embeddings and generations of the same prompts, side by side in the engine."""
    vectors: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    requests = [
        request
        for i, prompt in enumerate(prompts())
        for request in (EngineRequest(request_id=f"t{i}", prompt=prompt, params=GREEDY), embedding(f"v{i}", prompt, pooling))
    ]
    for message in submitted(llm, requests):
        tokens.setdefault(message.request_id, []).extend(message.tokens)
        if message.vector:
            vectors[message.request_id] = unit(message)
    numbers = range(len(prompts()))
    return [vectors[f"v{i}"] for i in numbers], [tokens[f"t{i}"] for i in numbers]


def test_dimensions_and_what_cannot_be(model: Path) -> None:
    with LLM(str(model), prefill_chunk=16) as llm:
        [whole], [cut] = llm.embed([5, 6, 7]), llm.embed([5, 6, 7], dimensions=10)
        assert len(whole) == 96 and len(cut) == 10
        assert cut == pytest.approx((np.array(whole[:10]) / np.linalg.norm(whole[:10])).tolist(), abs=1e-6)
        for bad in (0, 97):
            with pytest.raises(RequestError, match=f"dimensions is {bad}; it must be 1 to 96"):
                llm.embed("hi", dimensions=bad)
        with pytest.raises(RequestError, match="no tokens"):
            llm.embed([[1], []])
        assert not ask(llm, lambda engine: engine.scheduler.sequences), "what was queued beside it is gone"
        with pytest.raises(RequestError, match="maximum context length"):
            llm.embed([1] * 1000)
        assert len(llm.embed([[1] * llm.engine.layout.max_context])) == 1, "no room for output is needed"
        text = llm.engine.metrics.text().decode()
        assert "tandem_embeddings_total 3.0" in text and "tandem_generation_tokens_total 0.0" in text


def test_a_model_without_output_projection_embeds_and_no_more(tmp_path: Path) -> None:
    """Stored as sentence-transformers does: without the projection, names without `model.`, files beside it."""
    whole = tiny_model(tmp_path / "whole", "qwen3", config=HEADS)
    bare = tmp_path / "bare"
    shutil.copytree(whole, bare)
    weights = mx.load(str(next(whole.glob("*.safetensors"))))
    assert isinstance(weights, dict) and "lm_head.weight" in weights
    for file in bare.glob("model*.safetensors*"):
        file.unlink()
    mx.save_safetensors(
        str(bare / "model.safetensors"),
        {name.removeprefix("model."): array for name, array in weights.items() if not name.startswith("lm_head")},
    )
    (bare / "1_Pooling").mkdir()
    (bare / "1_Pooling" / "config.json").write_text(
        json.dumps({"word_embedding_dimension": 96, "pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True})
    )
    with LLM(str(bare)) as llm:
        assert llm.embed(prompts()) == near(reference(whole, "mean", prompts()))
        with pytest.raises(RequestError, match="only embeds"):
            llm.generate("hi")
