"""Filters, draws and random numbers against plain numpy references."""

from __future__ import annotations

from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.protocol.request import SamplingParams
from tandem.runner import sampler
from tandem.runner.filters import HEAD, FilterRows, TopP, draw, filtered_weights, largest, seed_keys, uniform_pairs
from tandem.runner.sampler import Sampler


def allowed(scaled: np.ndarray, params: SamplingParams) -> np.ndarray:
    """Reference filters on one row of scaled logits: bool [V]."""
    keep = np.ones(len(scaled), dtype=bool)
    if 0 < params.top_k < len(scaled):
        keep &= scaled >= np.sort(scaled)[-params.top_k]
    if params.top_p < 1.0:
        mass = np.where(keep, np.exp(scaled.astype(np.float64)), 0.0)
        mass /= mass.sum()
        order = np.argsort(-scaled, kind="stable")
        before = np.cumsum(mass[order]) - mass[order]
        keep &= scaled >= scaled[order[np.flatnonzero(before < params.top_p)[-1]]]
    if params.min_p > 0.0:
        keep &= scaled >= np.float32(np.log(np.float32(params.min_p)))
    return keep


def probabilities(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    scaled = (logits - logits.max()) / params.temperature
    mass = np.where(allowed(scaled, params), np.exp(scaled.astype(np.float64)), 0.0)
    return mass / mass.sum()


def filters_of(all_params: list[SamplingParams], vocab: int) -> FilterRows:
    sampler = Sampler(vocab)
    for i, params in enumerate(all_params):
        sampler.add(str(i), params, 0, [1], 1)
    return sampler._plan(tuple(str(i) for i in range(len(all_params)))).filters


row_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 3, 20, 400]),
    top_p=st.sampled_from([1e-4, 0.3, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
)


@settings(deadline=None, max_examples=80)
@given(
    all_params=st.lists(row_params, min_size=1, max_size=4),
    vocab=st.sampled_from([7, 128, 300, HEAD + 500]),
    spread=st.sampled_from([0.05, 1.0, 6.0]),
    top_p=st.sampled_from(["head", "sort", "halve"]),
    seed=st.integers(0, 2**31),
)
def test_filters_equal_the_reference(all_params: list[SamplingParams], vocab: int, spread: float, top_p: TopP, seed: int) -> None:
    rng = np.random.default_rng(seed)
    scaled = (
        rng.permuted(np.tile(np.linspace(-spread, spread, vocab), (len(all_params), 1)), axis=1) * rng.uniform(0.5, 1.5)
    ).astype(np.float32)
    scaled -= scaled.max(axis=1, keepdims=True)
    weights = np.array(filtered_weights(mx.array(scaled), filters_of(all_params, vocab), top_p=top_p))
    for row, params in enumerate(all_params):
        expected = allowed(scaled[row], params)
        different = np.flatnonzero((weights[row] > 0) != expected)
        # Sums of float32 differ in the last digits from the reference's: the token at the edge may go either way.
        assert len(different) <= (params.top_p < 1.0), (params, different)
        np.testing.assert_allclose(weights[row][weights[row] > 0], np.exp(scaled[row][weights[row] > 0]), rtol=1e-5)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.9999999, 1.0])
def test_halving_finds_what_a_sort_does(top_p: float) -> None:
    """Also among ties, next to tokens that are barred, and where p is reached by the last token alone."""
    rng = np.random.default_rng(7)
    scaled = np.stack(
        [
            rng.normal(size=5000) * 3,
            np.zeros(5000),
            np.linspace(-104, 0, 5000),
            np.where(np.arange(5000) % 2, -np.inf, rng.integers(-9, 1, 5000)),
            -1e-7 * np.arange(5000),
            np.where(np.arange(5000) == 3, 0, -np.inf),
        ]
    ).astype(np.float32)
    rows = mx.array(scaled - scaled.max(axis=1, keepdims=True))
    filters = FilterRows(top_p=mx.full((len(scaled), 1), top_p, dtype=mx.float32))
    halved, sorted_ = (np.array(filtered_weights(rows, filters, top_p=how)) for how in ("halve", "sort"))
    apart = np.abs(halved - sorted_).sum(axis=1) / sorted_.sum(axis=1)
    assert (apart < 1e-3).all(), apart  # sums of float32 in another order: of thousands alike, one or two
    assert (halved.max(axis=1) == 1).all() and apart[[1, 3, 5]].tolist() == [0, 0, 0]


@pytest.mark.parametrize(("device", "metal", "how"), [("cpu", True, "head"), ("gpu", True, "halve"), ("gpu", False, "sort")])
def test_on_metal_no_vocabulary_is_sorted(monkeypatch: pytest.MonkeyPatch, device: str, metal: bool, how: str) -> None:
    monkeypatch.setattr(
        sampler,
        "mx",
        SimpleNamespace(
            DeviceType=SimpleNamespace(cpu="cpu"),
            default_device=lambda: SimpleNamespace(type=device),
            metal=SimpleNamespace(is_available=lambda: metal),
        ),
    )
    assert sampler._top_p_method() == how


@pytest.mark.parametrize(("width", "k"), [(1, 1), (10, 3), (10, 10), (1000, 7), (1000, 999), (50_257, 20), (4096, 300)])
def test_largest_finds_the_largest(width: int, k: int) -> None:
    rows = np.random.default_rng(0).integers(-40, 40, size=(3, width)).astype(np.float32)
    values, places = (np.array(part) for part in largest(mx.array(rows), k))
    np.testing.assert_array_equal(np.sort(values), np.sort(rows)[:, width - k :])
    np.testing.assert_array_equal(np.take_along_axis(rows, places, axis=1), values)
    assert all(len(set(row)) == k for row in places.tolist())


def test_tokens_that_tie_with_the_last_one_kept_are_kept() -> None:
    scaled = mx.array([[-1.0, 0.0, -1.0, -2.0, -1.0]])
    top_k = filters_of([SamplingParams(top_k=2)], 5)
    assert (filtered_weights(scaled, top_k, top_p="head") > 0).tolist() == [[True, True, True, False, True]]
    top_p = filters_of([SamplingParams(top_p=0.6)], 5)
    assert (filtered_weights(scaled, top_p, top_p="head") > 0).tolist() == [[True, True, True, False, True]]


@pytest.mark.parametrize("vocab", [300, 151_936])
def test_top_p_over_a_flat_row_needs_more_than_the_head(vocab: int) -> None:
    scaled = np.linspace(-1e-3, 0, vocab, dtype=np.float32)[None]
    filters = filters_of([SamplingParams(top_p=0.5)], vocab)
    kept = int((filtered_weights(mx.array(scaled), filters, top_p="head") > 0).sum().item())
    assert kept == pytest.approx(vocab / 2, rel=1e-2)


FILTERS = [
    SamplingParams(temperature=0.7),
    SamplingParams(temperature=1.3, top_k=9),
    SamplingParams(temperature=1.0, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=30, top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("params", FILTERS, ids=repr)
def test_draws_follow_the_distribution(params: SamplingParams) -> None:
    vocab, rows, steps = 200, 256, 40
    logits = np.random.default_rng(5).normal(size=vocab).astype(np.float32) * 1.5
    sampler, ids = Sampler(vocab), [str(i) for i in range(rows)]
    for i, name in enumerate(ids):
        sampler.add(name, params, i, [1], 1)
    batch = mx.broadcast_to(mx.array(logits), (rows, vocab))
    drawn = np.concatenate([np.array(sampler.sample(batch, ids).tokens) for _ in range(steps)])
    expected = probabilities(logits, params) * rows * steps
    observed = np.bincount(drawn, minlength=vocab)
    assert observed[expected == 0].sum() == 0
    likely = expected >= 5
    rest = ~likely & (expected > 0)
    bins_e = np.append(expected[likely], expected[rest].sum() if rest.any() else [])
    bins_o = np.append(observed[likely], observed[rest].sum() if rest.any() else [])
    statistic, freedom = float(((bins_o - bins_e) ** 2 / bins_e).sum()), len(bins_e) - 1
    assert statistic < freedom + 4.5 * np.sqrt(2 * freedom) + 8  # beyond the 1e-5 quantile of chi-square


def test_the_tail_of_a_large_flat_vocabulary_is_drawn_evenly() -> None:
    vocab, rows = 151_936, 16
    uniforms = [uniform_pairs(seed_keys(list(range(rows))), np.full(rows, step, dtype=np.uint64)) for step in range(60)]
    drawn = np.concatenate([np.array(draw(mx.ones((rows, vocab)), mx.array(pairs))) for pairs in uniforms])
    counts = np.histogram(drawn, bins=8, range=(0, vocab))[0]
    assert len(drawn) == 960
    assert ((counts - 120) ** 2 / 120).sum() < 40


@pytest.mark.parametrize("vocab", [5, 128, 129, 1000])
def test_a_token_of_no_weight_is_never_drawn(vocab: int) -> None:
    edge = float(np.float32(1 - 2**-24))
    for alive in {0, vocab // 2, vocab - 1}:
        weights = mx.zeros((4, vocab))
        weights[:, alive] = 1e-30
        uniforms = mx.array([[0.0, 0.0], [edge, edge], [0.0, edge], [edge, 0.0]])
        assert draw(weights, uniforms).tolist() == [alive] * 4


def test_uniforms_are_a_pure_function_of_seed_and_position() -> None:
    keys = seed_keys([0, 1, 2**64 - 1, 0])
    one = uniform_pairs(keys, np.array([0, 0, 5, 7], dtype=np.uint64))
    again = uniform_pairs(keys[[3, 2]], np.array([7, 5], dtype=np.uint64))
    np.testing.assert_array_equal(one[[3, 2]], again)
    many = uniform_pairs(seed_keys([42] * 50_000), np.arange(50_000, dtype=np.uint64))
    assert many.min() >= 0.0
    assert many.max() < 1.0
    assert abs(many.mean() - 0.5) < 0.005
    assert abs(np.corrcoef(many.T)[0, 1]) < 0.02
    assert len(np.unique(many[:, 0])) > 49_900
