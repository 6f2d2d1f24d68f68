"""The batch sampler over steps: seeds, penalties, bans, log probabilities, logits that are not finite."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from tandem.protocol.request import SamplingParams
from tandem.runner.sampler import Sampler

EOS = 3


def one_row(logits: np.ndarray, params: SamplingParams) -> int:
    sampler = Sampler(len(logits), (EOS,))
    sampler.add("a", params, 0, [1], 1)
    return int(sampler.sample(mx.array(logits)[None], ["a"]).tokens.item())


def run(sampler: Sampler, ids: list[str], logits: list[mx.array]) -> list[list[int]]:
    return [sampler.sample(row, ids).tokens.tolist() for row in logits]


def test_a_seed_gives_the_same_tokens_in_any_batch_and_after_a_replay() -> None:
    vocab, steps = 500, 12
    rng = np.random.default_rng(0)
    mine = rng.normal(size=(steps, vocab)).astype(np.float32)
    other = rng.normal(size=(steps, vocab)).astype(np.float32)
    params = SamplingParams(temperature=1.1, top_p=0.95, frequency_penalty=0.3, repetition_penalty=1.2)
    alone = Sampler(vocab)
    alone.add("x", params, 77, [1, 2], 2)
    expected = [row[0] for row in run(alone, ["x"], [mx.array(row)[None] for row in mine])]

    crowd = Sampler(vocab)
    crowd.add("y", SamplingParams(temperature=0.0, presence_penalty=1.0), 1, [5], 1)
    crowd.add("x", params, 77, [1, 2], 2)
    crowd.add("z", SamplingParams(temperature=2.0, top_k=20), 77, [5], 1)
    batch = [mx.stack([mx.array(b), mx.array(a), mx.array(b)]) for a, b in zip(mine, other, strict=True)]
    assert [row[1] for row in run(crowd, ["y", "x", "z"], batch)] == expected

    replay = Sampler(vocab)
    replay.add("x", params, 77, [1, 2, *expected[:5]], 2)
    assert [row[0] for row in run(replay, ["x"], [mx.array(row)[None] for row in mine[5:]])] == expected[5:]


def test_greedy_rows_take_the_most_likely_token_beside_drawing_rows() -> None:
    logits = np.random.default_rng(1).normal(size=(3, 64)).astype(np.float32)
    sampler = Sampler(64)
    for name, temperature in (("a", 0.0), ("b", 1.0), ("c", 1e-7)):
        sampler.add(name, SamplingParams(temperature=temperature, top_k=3), 0, [1], 1)
    for _ in range(5):
        tokens = sampler.sample(mx.array(logits), ["a", "b", "c"]).tokens.tolist()
        assert (tokens[0], tokens[2]) == (logits[0].argmax(), logits[2].argmax())
        assert tokens[1] in np.argsort(-logits[1])[:3]


@pytest.mark.parametrize("crowded", [False, True])
def test_penalties_and_bias_equal_the_reference_over_steps(crowded: bool) -> None:
    vocab, steps, rng = 40, 15, np.random.default_rng(9)
    asked = {
        "a": SamplingParams(
            temperature=0.0, repetition_penalty=1.5, frequency_penalty=0.4, presence_penalty=0.7, logit_bias={4: 1.5, 8: -100.0}
        ),
        "b": SamplingParams(temperature=0.0, frequency_penalty=-0.2),
        **({"c": SamplingParams(temperature=0.0, logit_bias={0: 3.0})} if crowded else {}),
    }
    prompt = {"a": [1, 2, 2, 30], "b": [1], "c": [2]}
    output: dict[str, list[int]] = {"a": [7, 7], "b": [], "c": []}
    sampler, ids = Sampler(vocab), list(asked)
    for name, params in asked.items():
        sampler.add(name, params, 0, prompt[name] + output[name], len(prompt[name]))
    for step in range(steps):
        logits = rng.normal(size=(len(ids), vocab)).astype(np.float32)
        given_logits = mx.array(logits)
        tokens = sampler.sample(given_logits, ids).tokens.tolist()
        np.testing.assert_array_equal(np.array(given_logits), logits)
        for row, name in enumerate(ids):
            expected = penalised(logits[row], asked[name], prompt[name], output[name])
            assert tokens[row] == expected.argmax(), (step, name)
            output[name].append(tokens[row])
        if step == 7:
            ids = ids[::-1]


def penalised(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    logits = logits.copy()
    for token, value in params.logit_bias.items():
        logits[token] += value
    for token in set(prompt) | set(output):
        logits[token] *= params.repetition_penalty if logits[token] < 0 else 1 / params.repetition_penalty
    for token in set(output):
        logits[token] -= params.frequency_penalty * output.count(token) + params.presence_penalty
    return logits


def test_histories_come_and_go() -> None:
    sampler, params = Sampler(10), SamplingParams(temperature=0.0, presence_penalty=100.0)
    logits = mx.array([[0.0, 1, 2, 3, 4, 5, 6, 7, 8, 9]])
    for name in "abcde":
        sampler.add(name, params, 0, [1], 1)
        assert [sampler.sample(logits, [name]).tokens.item() for _ in range(3)] == [9, 8, 7]
    sampler.remove("b")
    sampler.remove("d")
    sampler.add("f", params, 0, [1, 9], 1)
    both = mx.concatenate([logits, logits])
    assert sampler.sample(both, ["f", "e"]).tokens.tolist() == [8, 6]
    for name in "acef":
        sampler.remove(name)
    sampler.add("g", params, 0, [1], 1)
    assert sampler.sample(logits, ["g"]).tokens.tolist() == [9]


def test_early_ends_are_banned_until_min_tokens() -> None:
    logits = np.zeros((1, 8), dtype=np.float32)
    logits[0, [EOS, 5, 6]] = [9.0, 8.0, 7.0]
    sampler = Sampler(8, (EOS, 99))
    sampler.add("a", SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(5,)), 0, [1, 6], 1)
    assert [sampler.sample(mx.array(logits), ["a"]).tokens.item() for _ in range(4)] == [6, 6, EOS, EOS]
    assert one_row(logits[0], SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True)) == EOS


def test_an_id_that_comes_again_has_bans_of_its_own() -> None:
    logits = np.zeros((1, 8), dtype=np.float32)
    logits[0, [5, 6, 7]] = [9.0, 8.0, 7.0]
    sampler = Sampler(8, (EOS,))
    for stop, expected in ((5, 6), (6, 5)):
        sampler.add("a", SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=(stop,)), 0, [1], 1)
        assert sampler.sample(mx.array(logits), ["a"]).tokens.item() == expected
        sampler.remove("a")


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9),
        SamplingParams(temperature=1.0, top_k=4, min_p=0.1),
        SamplingParams(temperature=0.0, presence_penalty=1.0),
    ],
    ids=repr,
)
def test_logits_that_are_not_finite_give_no_token(params: SamplingParams, poison: float) -> None:
    logits = np.random.default_rng(0).normal(size=(2, 2000)).astype(np.float32)
    logits[1, 1234] = poison
    sampler = Sampler(2000)
    sampler.add("a", params, 0, [1], 1)
    sampler.add("b", params, 0, [1], 1)
    tokens = sampler.sample(mx.array(logits), ["a", "b"]).tokens.tolist()
    assert tokens[0] >= 0
    assert tokens[1] == -1
    assert one_row(np.full(20, -np.inf, dtype=np.float32), params) == -1


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16], ids=str)
def test_greedy_rows_of_any_type_are_marked_where_they_are_not_finite(dtype: mx.Dtype) -> None:
    logits = np.random.default_rng(0).normal(size=(5, 3000)).astype(np.float32)
    logits[0, 7], logits[1, 2999], logits[2, 5] = np.nan, np.inf, -np.inf
    logits[3] = -np.inf
    sampler = Sampler(3000)
    for name in "abcde":
        sampler.add(name, SamplingParams(temperature=0.0), 0, [1], 1)
    given = mx.array(logits).astype(dtype)
    tokens = sampler.sample(given, list("abcde")).tokens
    assert tokens.dtype == mx.int32
    assert tokens.tolist() == [-1, -1, mx.argmax(given[2]).item(), -1, mx.argmax(given[4]).item()]


def test_half_precision_logits_are_sound() -> None:
    sampler = Sampler(100_000)
    sampler.add("a", SamplingParams(temperature=0.0), 0, [1], 1)
    logits = mx.full((1, 100_000), 20.0, dtype=mx.float16)  # their sum is beyond float16
    assert sampler.sample(logits, ["a"]).tokens.tolist() == [0]


def test_logprobs_are_for_rows_that_ask() -> None:
    logits = np.random.default_rng(3).normal(size=(3, 50)).astype(np.float32)
    sampler = Sampler(50, (EOS,))
    sampler.add("a", SamplingParams(temperature=0.5, logprobs=3), 1, [1], 1)
    sampler.add("b", SamplingParams(temperature=0.0), 1, [1], 1)
    sampler.add("c", SamplingParams(temperature=0.0, logprobs=0, logit_bias={7: 30.0}), 1, [1], 1)
    sampled = sampler.sample(mx.array(logits), ["a", "b", "c"])
    found, tokens = sampled.logprobs(), sampled.tokens.tolist()
    assert set(found) == {"a", "c"}
    log_p = logits[0] - np.log(np.exp(logits[0]).sum())
    assert found["a"][0].token == tokens[0]
    assert found["a"][0].logprob == pytest.approx(log_p[tokens[0]], abs=1e-5)
    assert [token for token, _ in found["a"][0].top] == list(np.argsort(-log_p)[:3])
    assert [p for _, p in found["a"][0].top] == pytest.approx(sorted(log_p)[::-1][:3], abs=1e-5)
    assert found["c"][0].token == 7
    assert found["c"][0].logprob == pytest.approx(0.0, abs=1e-5)
    assert found["c"][0].top == []


def test_logprobs_are_read_from_arrays_that_the_next_step_does_not_take() -> None:
    sampler = Sampler(4, (EOS,))
    sampler.add("a", SamplingParams(temperature=0.0, logprobs=0), 0, [1], 1)
    sampled = sampler.sample(mx.array([[1.0, 2.0, 3.0, 4.0]]), ["a"])
    assert not {id(one) for one in sampled.arrays[1:]} & {id(sampled.tokens)}, "MLX arrays must not be shared by threads"


def test_banned_tokens_do_not_show_up_in_logprobs() -> None:
    sampler = Sampler(4, (EOS,))
    sampler.add("a", SamplingParams(temperature=0.0, logprobs=9, min_tokens=2), 0, [1], 1)
    top = sampler.sample(mx.array([[1.0, 2.0, 3.0, 4.0]]), ["a"]).logprobs()["a"][0].top
    assert [token for token, _ in top] == [2, 1, 0]


def test_misuse_is_refused() -> None:
    sampler = Sampler(4)
    sampler.add("a", SamplingParams(), 0, [1], 1)
    with pytest.raises(ValueError, match="already"):
        sampler.add("a", SamplingParams(), 0, [1], 1)
    with pytest.raises(ValueError, match="logits"):
        sampler.sample(mx.zeros((1, 5)), ["a"])
    with pytest.raises(KeyError):
        sampler.sample(mx.zeros((1, 4)), ["b"])
    with pytest.raises(KeyError):
        sampler.remove("b")
