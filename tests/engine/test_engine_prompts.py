"""Log probabilities and embeddings of prompts: in every layout mlx-lm's own, whatever else is in the batch."""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load_model

from adapters import tiny_adapter
from submitted import Killer, ask, check, submitted
from tandem import LLM, AsyncLLM, RequestOutput, SamplingParams
from tandem.errors import RequestError
from tandem.protocol.control import Output
from tandem.protocol.logprobs import PromptLogprobs
from tandem.protocol.request import EngineRequest
from tandem.runner import prompt_scorer
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
ALONE = SamplingParams(max_tokens=0, prompt_logprobs=3)
BESIDE = SamplingParams(
    max_tokens=12, temperature=0.0, ignore_eos=True, prompt_logprobs=3, repetition_penalty=1.5, logit_bias={7: 5.0}
)
"""What changes the answer does not change what is said of the prompt."""
LABELS = (9, 400, 3)


def prompts() -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 500) for _ in range(length)] for length in (1, 2, 17, 40, 97)]


@cache
def loaded(model: Path, adapter: Path | None = None) -> Any:
    """mlx-lm's own model in float32."""
    whole, _ = load_model(model)
    if adapter is not None:
        whole = load_adapters(whole, str(adapter))
    whole.set_dtype(mx.float32)
    return whole


def reference(model: Path, tokens: list[int], adapter: Path | None = None) -> npt.NDArray[np.float32]:
    """float32 [n - 1, V]: log probabilities after each position but the last, from mlx-lm's own model in float32."""
    if len(tokens) < 2:
        return np.zeros((0, 1), dtype=np.float32)
    logits = loaded(model, adapter)(mx.array([tokens]))[0, :-1]
    return np.array(logits - mx.logsumexp(logits, axis=-1, keepdims=True))


def agree(model: Path, tokens: list[int], found: PromptLogprobs | None, k: int = 3) -> None:
    """Own values, ranks and the k most likely."""
    assert found is not None and len(found) == len(tokens) - 1
    for token, one, row in zip(tokens[1:], found, reference(model, tokens), strict=True):
        assert one.logprob == pytest.approx(row[token], abs=1e-4)
        assert abs(one.rank - 1 - int((row > row[token]).sum())) <= int((abs(row - row[token]) < 1e-4).sum())
        assert len(one.top) == k and [value for _, value in one.top] == pytest.approx(np.sort(row)[::-1][:k], abs=1e-4)
        assert all(value == pytest.approx(row[other], abs=1e-4) for other, value in one.top)


def pooled(model: Path, pooling: str, texts: list[list[int]]) -> list[list[float]]:
    """From mlx-lm's own model in float32: final hidden states of the whole prompt at once."""
    vectors = []
    for tokens in texts:
        states = np.array(loaded(model).model(mx.array([tokens]))[0])
        vector = states[-1] if pooling == "last" else states.mean(axis=0)
        vectors.append((vector / np.linalg.norm(vector)).tolist())
    return vectors


def near(vectors: list[list[float]]) -> list[object]:
    return [pytest.approx(vector, abs=2e-5) for vector in vectors]


def embedding(name: str, tokens: list[int], pooling: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tokens, params=SamplingParams(max_tokens=0), pooling=pooling)


def labelled(model: Path, name: str, tokens: list[int]) -> tuple[EngineRequest, object]:
    """A request for the log probabilities of `LABELS`, and mlx-lm's own."""
    logits = loaded(model)(mx.array([tokens]))[0, -1]
    expected = (logits - mx.logsumexp(logits))[mx.array(LABELS)].tolist()
    request = EngineRequest(
        request_id=name, prompt=tokens, params=SamplingParams(max_tokens=0), pooling="last", label_token_ids=LABELS
    )
    return request, pytest.approx(expected, abs=1e-4)


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


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", config=HEADS)


@pytest.fixture(scope="module", params=LAYOUTS)
def llm(model: Path, request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(str(model), prefill_chunk=16, **LAYOUTS[request.param]) as one:
        yield one


def outcome(llm: LLM, requests: list[EngineRequest]) -> dict[str, Output]:
    """All that is said of each request, in one."""
    whole: dict[str, Output] = {}
    for message in submitted(llm, requests):
        before = whole.get(message.request_id, Output(message.request_id))
        assert before.prompt_logprobs is None or message.prompt_logprobs is None, "they come once"
        whole[message.request_id] = Output(
            message.request_id,
            before.tokens + message.tokens,
            finish_reason=message.finish_reason,
            cached_tokens=before.cached_tokens + message.cached_tokens,
            prompt_logprobs=message.prompt_logprobs if before.prompt_logprobs is None else before.prompt_logprobs,
        )
    return whole


@pytest.mark.slow
def test_values_equal_mlx_lms_and_leave_generation_alone(llm: LLM, model: Path) -> None:
    alone = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    assert llm.generate(prompts()[-1], GREEDY)[0].cached_tokens > 0, "the cache holds these prompts"
    requests = [
        EngineRequest(request_id=f"{kind}{i}", prompt=prompt, params=params)
        for i, prompt in enumerate(prompts())
        for kind, params in (("t", GREEDY), ("s", ALONE), ("b", BESIDE))
    ]
    found = outcome(llm, requests)
    for i, prompt in enumerate(prompts()):
        text, scored, both = (found[f"{kind}{i}"] for kind in "tsb")
        assert text.tokens == alone[i] and text.prompt_logprobs is None
        assert (scored.tokens, scored.finish_reason, scored.cached_tokens) == ([], "length", 0)
        assert len(both.tokens) == 12 and both.cached_tokens == 0
        agree(model, prompt, scored.prompt_logprobs)
        agree(model, prompt, both.prompt_logprobs)
    check(llm)


@pytest.mark.slow
def test_a_ranks_death_is_not_seen(llm: LLM, model: Path) -> None:
    if len(llm.engine.executor.pids) != 2:
        pytest.skip("for layouts of two processes")
    rng = random.Random(1)
    texts = [[rng.randrange(3, 500) for _ in range(400)] for _ in range(3)]
    asked = [
        *(EngineRequest(request_id=f"s{i}", prompt=text, params=ALONE if i else BESIDE) for i, text in enumerate(texts)),
        *(embedding(f"v{i}", text, "mean") for i, text in enumerate(texts)),
    ]
    found: dict[str, PromptLogprobs] = {}
    vectors: dict[str, list[float]] = {}
    for one in submitted(llm, asked, Killer(llm)):
        if one.prompt_logprobs is not None:
            found[one.request_id] = one.prompt_logprobs
        if one.vector:
            vectors[one.request_id] = unit(one)
    assert llm.engine.restarts == 1
    for i, text in enumerate(texts):
        agree(model, text, found[f"s{i}"])
    assert [vectors[f"v{i}"] for i in range(len(texts))] == near(pooled(model, "mean", texts))


def test_sequences_that_make_room_are_computed_again_and_say_all_of_it_once(model: Path) -> None:
    with LLM(str(model), prefill_chunk=16, kv_tokens=440, max_batch_size=4) as llm:
        rng = random.Random(2)
        texts = [[rng.randrange(3, 500) for _ in range(60)] for _ in range(6)]
        long = SamplingParams(max_tokens=120, temperature=0.0, ignore_eos=True, prompt_logprobs=3)
        found = outcome(llm, [EngineRequest(request_id=f"s{i}", prompt=text, params=long) for i, text in enumerate(texts)])
        assert ask(llm, lambda engine: engine.scheduler.batches.preemptions) > 0
        for i, text in enumerate(texts):
            agree(model, text, found[f"s{i}"].prompt_logprobs)
            assert len(found[f"s{i}"].tokens) == 120


def test_in_python_they_have_vllms_shape(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_scorer, "LOGITS_BYTES", 3 * 4 * 512)  # three positions at a time
    with LLM(str(model)) as llm:
        prompt = prompts()[-1]
        one, two = llm.generate([prompt, [5]], SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=2))
        shape(llm, model, one, 2)
        assert two.prompt_logprobs == [None] and llm.generate([5, 6], GREEDY)[0].prompt_logprobs is None
        [bare] = llm.generate("hello", SamplingParams(max_tokens=0, prompt_logprobs=0))
        assert (bare.text, bare.token_ids, bare.finish_reason) == ("", [], "length")
        assert bare.prompt_logprobs is not None and [len(place or ()) for place in bare.prompt_logprobs] == [
            0,
            *[1] * (len(bare.prompt_token_ids) - 1),
        ]
        assert "embeddings_total 0.0" in llm.engine.metrics.text().decode()
        for bad in (-1, 21, 10**9):
            with pytest.raises(RequestError, match=f"prompt_logprobs is {bad}; it must be between 0 and 20"):
                llm.generate("hello", SamplingParams(prompt_logprobs=bad))
        with pytest.raises(RequestError, match="max_tokens is 0"):
            llm.generate("hello", SamplingParams(max_tokens=0))
        full = [7] * llm.engine.layout.max_context
        [whole] = llm.generate([full], ALONE)
        assert len(whole.prompt_logprobs or ()) == len(full), "no room for output is needed"


def shape(llm: LLM, model: Path, output: RequestOutput, k: int) -> None:
    """For each token of the prompt a dict by token id: itself first, then the most likely ones."""
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    tokens = output.prompt_token_ids
    for token, place, row in zip(tokens[1:], output.prompt_logprobs[1:], reference(model, tokens), strict=True):
        assert place is not None and next(iter(place)) == token and len(place) - k in (0, 1)
        assert [place[token].logprob, place[token].decoded_token] == [
            pytest.approx(row[token], abs=1e-4),
            llm.tokenizer.token_text(token),
        ]
        assert {one.rank for one in place.values()} >= set(range(1, k + 1))


def test_for_asyncio_and_with_an_adapter_too(model: Path, tmp_path: Path) -> None:
    adapter = tiny_adapter(model, tmp_path / "adapter")

    async def run() -> RequestOutput:
        async with AsyncLLM(str(model), adapter_path=str(adapter)) as llm:
            return (await llm.generate([prompts()[2]], SamplingParams(max_tokens=0, prompt_logprobs=1)))[0]

    output = asyncio.run(run())
    rows = reference(model, prompts()[2], adapter)
    assert output.prompt_logprobs is not None
    for token, place, row in zip(prompts()[2][1:], output.prompt_logprobs[1:], rows, strict=True):
        assert place is not None and place[token].logprob == pytest.approx(row[token], abs=1e-4)


def test_logits_that_are_no_numbers_end_the_request(tmp_path: Path) -> None:
    broken = tiny_model(tmp_path, "qwen3")
    weights = mx.load(str(broken / "model.safetensors"))
    assert isinstance(weights, dict)
    weights["model.embed_tokens.weight"][9] = mx.full((weights["model.embed_tokens.weight"].shape[1],), math.nan)
    mx.save_safetensors(str(broken / "model.safetensors"), weights, {"format": "mlx"})
    with LLM(str(broken)) as llm:
        for params in (ALONE, BESIDE):
            with pytest.raises(RequestError, match="not finite"):
                llm.generate([[9, 5, 6]], params)
        assert len(llm.generate([[5, 6]], ALONE)[0].prompt_logprobs or ()) == 2


@pytest.mark.slow
def test_vectors_equal_mlx_lms_and_leave_generation_alone(llm: LLM, model: Path) -> None:
    alone = [one.token_ids for one in llm.generate(prompts(), GREEDY)]
    last, mean = (near(pooled(model, pooling, prompts())) for pooling in ("last", "mean"))
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
    assert [vectors[f"v{i}"] for i in range(len(texts))] == near(pooled(model, pooling, texts))


@pytest.mark.slow
def test_labels_have_mlx_lms_log_probabilities_also_when_a_rank_dies(llm: LLM, model: Path) -> None:
    rng = random.Random(3)
    texts = [*prompts(), *([rng.randrange(3, 500) for _ in range(12)] for _ in range(6))]
    asked = [labelled(model, f"l{i}", text) for i, text in enumerate(texts)]
    beside = [EngineRequest(request_id="t", prompt=texts[2], params=GREEDY), embedding("v", texts[6], "last")]
    killer = Killer(llm) if len(llm.engine.executor.pids) == 2 else (lambda _: None)
    found = {message.request_id: message for message in submitted(llm, [*(one for one, _ in asked), *beside], killer)}
    for request, expected in asked:
        message = found[request.request_id]
        assert (message.tokens, message.finish_reason) == ([], "stop")
        assert np.frombuffer(message.vector, "<f4").tolist() == expected
    assert unit(found["v"]) == near(pooled(model, "last", [texts[6]]))[0]


def test_labels_that_cannot_be(model: Path) -> None:
    with LLM(str(model)) as llm:
        request, expected = labelled(model, "a", prompts()[2])
        [message] = submitted(llm, [request])
        assert np.frombuffer(message.vector, "<f4").tolist() == expected
        for pooling, labels in (("mean", (5,)), ("last", (5, 512)), ("last", (-1,))):
            wrong = EngineRequest(
                request_id="b", prompt=[5], params=SamplingParams(max_tokens=0), pooling=pooling, label_token_ids=labels
            )
            with pytest.raises(RequestError, match="needs pooling 'last', and ids from 0 to 511"):
                list(submitted(llm, [wrong]))


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
        assert llm.embed(prompts()) == near(pooled(whole, "mean", prompts()))
        with pytest.raises(RequestError, match="only embeds"):
            llm.generate("hi")
