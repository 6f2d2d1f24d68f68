"""The KV store against sequences that each keep a cache of their own."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_map
from mlx_lm.models import gemma3_text, gpt_oss, llama
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

from kv_invariants import check_store
from tandem.errors import UnsupportedModel
from tandem.loading.quantized_kv import GroupedKVCache, Groups
from tandem.loading.seams import let_caches_attend
from tandem.runner import kv_store
from tandem.runner.kv_store import KVStore, reserve

VOCAB = 61
WINDOW = 8


def tiny_llama() -> Any:
    return llama.Model(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            tie_word_embeddings=True,
        )
    )


def tiny_gemma() -> Any:
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=4,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=16,
            query_pre_attn_scalar=16,
            vocab_size=VOCAB,
            sliding_window=WINDOW,
            sliding_window_pattern=2,
        )
    )


def tiny_gpt_oss() -> Any:
    return gpt_oss.Model(
        gpt_oss.ModelArgs(
            num_hidden_layers=2,
            num_local_experts=2,
            num_experts_per_tok=1,
            vocab_size=VOCAB,
            hidden_size=32,
            intermediate_size=32,
            head_dim=16,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=WINDOW,
            rope_theta=10000,
        )
    )


class QuantizedLlama(llama.Model):
    """Keeps keys and values in groups of 8 bits."""

    off = 5e-3
    """Sums in another order may give a number at the border of two codes the other one."""

    def make_cache(self) -> list[Any]:
        return [GroupedKVCache(Groups(8, 32)) for _ in self.layers]


def tiny_quantized() -> Any:
    let_caches_attend()
    return QuantizedLlama(
        llama.ModelArgs(
            model_type="llama",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=48,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
            tie_word_embeddings=True,
        )
    )


MODELS = [tiny_llama, tiny_gemma, tiny_gpt_oss, tiny_quantized]


@pytest.fixture(params=MODELS, ids=lambda make: make.__name__)
def model(request: pytest.FixtureRequest) -> Any:
    mx.random.seed(7)
    made = request.param()
    mx.eval(made.parameters())
    return made


def prefilled(model: Any, prompt: list[int], chunk: int = 0) -> list[Any]:
    caches = model.make_cache()
    step = chunk or len(prompt)
    for start in range(0, len(prompt), step):
        model(mx.array([prompt[start : start + step]]), cache=caches)
    mx.eval([cache.state for cache in caches])
    return caches


class Reference:
    """Each sequence with caches of its own, one forward pass a sequence."""

    def __init__(self, model: Any) -> None:
        self.model, self.caches = model, {}

    def step(self, ids: list[str], tokens: list[int]) -> np.ndarray:
        rows = [self.model(mx.array([[token]]), cache=self.caches[one])[0, -1] for one, token in zip(ids, tokens, strict=True)]
        return np.array(mx.stack(rows))


def step_both(store: KVStore, reference: Reference, rng: random.Random) -> None:
    ids, order = store.ids, store.rows
    tokens = [rng.randrange(VOCAB) for _ in ids]
    fed = dict(zip(ids, tokens, strict=True))
    logits = reference.model(mx.array([[fed.get(one, 0)] for one in order]), cache=store.batch())[:, -1]
    np.testing.assert_allclose(
        np.array(logits)[[bool(one) for one in order]],
        reference.step(ids, tokens),
        rtol=2e-4,
        atol=getattr(reference.model, "off", 2e-5),
    )


@pytest.mark.parametrize(("seed", "cuda"), [(0, False), (3, True)])
def test_random_joins_leaves_and_steps_agree_with_single_sequences(
    model: Any, seed: int, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(kv_store, "IDLE", 2)
    rng = random.Random(seed)
    store, reference, serial, idle = KVStore(model.make_cache), Reference(model), 0, 0
    store.idles = not cuda
    for _ in range(40):
        action = rng.random()
        if action < 0.3 or not store.ids:
            prompt = [rng.randrange(VOCAB) for _ in range(rng.choice([1, 3, WINDOW - 1, WINDOW, WINDOW + 1, 29]))]
            name, chunk, serial = f"r{serial}", rng.choice([0, 0, 1, 5]), serial + 1
            store.join(name, prefilled(model, prompt, chunk))
            reference.caches[name] = prefilled(model, prompt, chunk)
        elif action < 0.45:
            gone = rng.choice(store.ids)
            store.leave(gone)
            del reference.caches[gone]
        else:
            for _ in range(rng.randrange(1, 6)):
                step_both(store, reference, rng)
        check_store(store)
        assert {name: store.length(name) for name in store.ids} == {
            name: caches[0].offset for name, caches in reference.caches.items()
        }
        idle += len(store.rows) - len(store)
    assert (idle > 0) is not cuda


def test_rows_leave_without_a_wait_for_the_device_while_others_join(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []
    monkeypatch.setattr(mx, "eval", lambda moved: waits.append(any(moved)))
    store = KVStore(lambda: [KVCache()])
    store.idles = True
    for i in range(32):
        store.join(str(i), numbers(3, 0.0))
    for i in range(32):
        store.leave(str(i))
        store.join(str(32 + i), numbers(3, 0.0))
    assert not any(waits)
    assert store.ids == [str(32 + i) for i in range(32)]
    for i in range(32, 64):
        store.leave(str(i))
    assert 0 < sum(waits) < 12
    assert store.nbytes == 0


def test_attention_of_our_own_is_given_quantised_keys_too() -> None:
    """Rows of different lengths, which it may read each as far as it goes."""
    model, seen = tiny_quantized(), []

    def attention(queries: mx.array, keys: Any, values: Any, lengths: mx.array, longest: int, scale: float) -> mx.array:
        seen.append((keys.codes.shape[:3], lengths.tolist(), longest))
        mask = (mx.arange(longest + 1) <= lengths[:, None])[:, None, None]
        return mx.fast.scaled_dot_product_attention(queries, keys.expanded(), values.expanded(), scale=scale, mask=mask)

    logits = []
    for own in (None, attention):
        store, rng = KVStore(model.make_cache, attention=own), random.Random(1)
        for number in range(3):
            store.join(str(number), prefilled(model, [rng.randrange(VOCAB) for _ in range(5 + number)]))
        logits.append(model(mx.array([[1], [2], [3]]), cache=store.batch()))
    assert seen[0] == ((3, 2, 8), [5, 6, 7], 7)
    assert mx.allclose(*logits, atol=1e-4)


@pytest.mark.parametrize("cuda", [False, True], ids=["", "as on CUDA"])
@pytest.mark.parametrize("together", [True, False], ids=["one length", "ragged"])
def test_drafts_that_are_cut_off_again_leave_no_trace(
    model: Any, together: bool, cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows take up to 4 tokens a step, of which the first few count: their logits are those of one token at a time."""
    monkeypatch.setattr(mx.cuda, "is_available", lambda: cuda)
    rng = random.Random(4)
    store, reference = KVStore(model.make_cache, drafts=3), Reference(model)
    for name, length in zip("abc", (5, 5, 5) if together else (WINDOW - 2, 1, WINDOW + 3), strict=True):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        store.join(name, prefilled(model, prompt))
        reference.caches[name] = prefilled(model, prompt)
    for step in range(25):
        counts = [4] * 3 if together else [rng.randint(1, 4) for _ in store.ids]
        width, kept = max(counts), rng.randint(1, 4) if together else 0
        tokens = [[rng.randrange(VOCAB) for _ in range(width)] for _ in store.ids]
        before = [store.length(one) for one in store.ids]
        logits = reference.model(mx.array(tokens), cache=store.batch(counts))
        lengths: dict[str, int] = {}
        for row, (name, count) in enumerate(zip(store.ids, counts, strict=True)):
            assert store.length(name) == before[row] + count
            count = kept or rng.randint(1, count)
            expected = [reference.step([name], [token])[0] for token in tokens[row][:count]]
            np.testing.assert_allclose(
                np.array(logits[row, :count]), np.stack(expected), rtol=2e-4, atol=getattr(model, "off", 2e-5)
            )
            lengths[name] = before[row] + count
        if step in (16, 19):  # a row that moves before it is cut
            caches = store.extract("c")
            store.leave("c")
            store.join("c", caches)
        for name, length in lengths.items():
            store.cut(name, length)
        check_store(store)
        if step == 8 and not together:
            store.leave("a")
        if step == 12:
            step_both(store, reference, rng)
            caches = store.extract("b")
            store.leave("b")
            store.join("b", caches)


def test_keys_and_values_are_read_without_drafts_that_were_cut_off(model: Any) -> None:
    store, rng = KVStore(model.make_cache, drafts=3), random.Random(4)
    for name, length in (("a", 2), ("b", WINDOW + 3)):
        store.join(name, prefilled(model, [rng.randrange(VOCAB) for _ in range(length)]))
    for _ in range(9):
        model(mx.array([[rng.randrange(VOCAB) for _ in range(4)] for _ in "ab"]), cache=store.batch([4, 4]))
        for name in "ab":
            length = store.length(name) - rng.randint(1, 3)
            found = store.last_kv(name, length)
            mx.eval(found)
            store.cut(name, length)
            expected: dict[str, list[mx.array]] = {}
            for cache in store.extract(name):
                parts = cache.state[:2]
                if isinstance(cache, GroupedKVCache):
                    parts = [mx.dequantize(*part, group_size=cache.group_size, bits=cache.bits) for part in parts]
                elif isinstance(cache, RotatingKVCache):
                    parts = [part[:, :, -WINDOW:] for part in parts]
                expected["sliding_attention" if isinstance(cache, RotatingKVCache) else "full_attention"] = parts
            assert found.keys() == expected.keys()
            assert all(map(mx.array_equal, sum(found.values(), []), sum(map(list, expected.values()), [])))


def test_cuts_and_counts_that_no_drafts_explain_are_refused() -> None:
    store = KVStore(lambda: [KVCache()], drafts=2)
    cache = KVCache()
    cache.update_and_fetch(mx.zeros((1, 1, 5, 4)), mx.zeros((1, 1, 5, 4)))
    store.join("a", [cache])
    for length in (2, 6):
        with pytest.raises(ValueError, match="cannot be cut"):
            store.cut("a", length)
    for counts in ([4], [0], [1, 1]):
        with pytest.raises(ValueError, match="at most 2 drafts"):
            store.batch(counts)
    with pytest.raises(UnsupportedModel, match="without speculative decoding"):
        KVStore(lambda: [type("Other", (KVCache,), {})()], drafts=2)


def test_rows_of_one_length_agree(model: Any) -> None:
    rng = random.Random(1)
    store, reference = KVStore(model.make_cache), Reference(model)
    for name in "ab":
        prompt = [rng.randrange(VOCAB) for _ in range(5)]
        store.join(name, prefilled(model, prompt))
        reference.caches[name] = prefilled(model, prompt)
    for _ in range(2 * WINDOW):
        step_both(store, reference, rng)


def test_extracted_rows_go_on_alone_and_join_again(model: Any) -> None:
    rng = random.Random(2)
    store, reference = KVStore(model.make_cache), Reference(model)
    for name, length in (("a", 3), ("b", 2 * WINDOW + 3), ("c", WINDOW)):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        store.join(name, prefilled(model, prompt))
        reference.caches[name] = prefilled(model, prompt)
    for _ in range(6):
        step_both(store, reference, rng)
    taken = {name: store.extract(name) for name in store.ids}
    for name, caches in taken.items():
        alone = model(mx.array([[5]]), cache=store_copy(caches))[0, -1]
        expected = model(mx.array([[5]]), cache=store_copy(reference.caches[name]))[0, -1]
        np.testing.assert_allclose(np.array(alone), np.array(expected), rtol=2e-4, atol=getattr(model, "off", 2e-5))
    for name in ("a", "b", "c"):
        store.leave(name)
    for name in ("c", "a", "b"):
        store.join(name, taken[name])
    assert store.ids == ["c", "a", "b"]
    for _ in range(WINDOW + 1):
        step_both(store, reference, rng)


def store_copy(caches: list[Any]) -> list[Any]:
    return [type(c).from_state(tuple(p[...] if isinstance(p, mx.array) else p for p in c.state)) for c in caches]


def poisoned(array: mx.array) -> mx.array:
    return array if array.dtype == mx.uint32 else array * float("nan")


@pytest.mark.parametrize("first", [True, False], ids=["the last row takes its place", "a new row takes its place"])
def test_what_is_not_finite_goes_with_its_row(model: Any, first: bool) -> None:
    rng = random.Random(3)
    store, reference = KVStore(model.make_cache), Reference(model)
    for name, length in (("poison", 40), ("a", 3)) if first else (("a", 3), ("poison", 40)):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        caches = prefilled(model, prompt)
        if name == "poison":
            for cache in caches:
                cache.keys, cache.values = tree_map(poisoned, (cache.keys, cache.values))
        else:
            reference.caches[name] = prefilled(model, prompt)
        store.join(name, caches)
    store.leave("poison")
    for name, length in (("b", 2), ("c", 50)):
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        store.join(name, prefilled(model, prompt))
        reference.caches[name] = prefilled(model, prompt)
    for _ in range(3):
        step_both(store, reference, rng)


def numbers(length: int, start: float, make: Callable[[], Any] = KVCache) -> list[Any]:
    cache = make()
    values = (mx.arange(length, dtype=mx.float32) + start).reshape(1, 1, length, 1)
    cache.update_and_fetch(values, -values)
    return [cache]


def test_the_last_row_takes_the_place_of_one_that_leaves() -> None:
    store = KVStore(lambda: [KVCache()])
    for i, name in enumerate("abcd"):
        store.join(name, numbers(i + 1, 10.0 * i))
    store.leave("b")
    assert store.ids == ["a", "d", "c"]
    store.leave("c")
    assert store.ids == ["a", "d"]
    assert [store.length(name) for name in store.ids] == [1, 4]
    keys, values, length = store.extract("d")[0].state
    assert (keys.flatten().tolist(), values.flatten().tolist(), length) == ([30, 31, 32, 33], [-30, -31, -32, -33], 4)
    assert len(store) == 2
    assert "a" in store
    assert "b" not in store


def one_step(store: KVStore) -> None:
    cache = store.batch()[0]
    new = mx.zeros((len(store), 1, 1, 1))
    mx.eval(cache.update_and_fetch(new, new))


def test_memory_grows_with_need_and_is_given_back() -> None:
    store = KVStore(lambda: [KVCache()])
    assert store.nbytes == 0
    for name in "abcdefgh":
        store.join(name, numbers(3, 0.0))
    few = store.nbytes
    assert 8 * 256 * 8 <= few <= 12 * 256 * 8
    store.join("long", numbers(5000, 0.0))
    assert store.nbytes > 15 * few
    store.leave("long")
    assert store.nbytes <= 2 * few
    for name in "abcdefg":
        store.leave(name)
        check_store(store)
    assert store.nbytes <= 2 * 256 * 8
    store.leave("h")
    assert store.nbytes == 0
    check_store(store)
    store.join("again", numbers(3, 0.0))
    one_step(store)
    assert store.length("again") == 4


def test_steps_cross_the_growth_of_the_kv_buffer() -> None:
    store = KVStore(lambda: [KVCache()])
    store.join("a", numbers(250, 0.0))
    store.join("b", numbers(3, 0.0))
    for _ in range(300):
        one_step(store)
    check_store(store)
    assert store.extract("b")[0].state[0].flatten().tolist() == [0.0, 1.0, 2.0] + [0.0] * 300


def test_a_step_copies_no_kv_buffer_even_with_extracts_alive() -> None:
    store = KVStore(lambda: [KVCache()])
    for name, length in (("a", 40_000), ("b", 30_000)):
        store.join(name, numbers(length, 0.0))
    one_step(store)
    alive = [store.extract("b")]
    mx.synchronize()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    for _ in range(3):
        one_step(store)
    mx.synchronize()
    assert mx.get_peak_memory() - before < store.nbytes / 4
    assert alive[0][0].offset == 30_001


@pytest.mark.parametrize("lengths", [(9, 4), (9, 9), (3, 2), (20, 15), (20, 3)])
@pytest.mark.parametrize(("window", "span"), [(0, None), (0, 5), (12, None), (12, 5)])
def test_masks_equal_the_reference(lengths: tuple[int, ...], window: int, span: int | None) -> None:
    store = KVStore(lambda: [RotatingKVCache(max_size=window) if window else KVCache()])
    for i, length in enumerate(lengths):
        store.join(str(i), numbers(length, 0.0, lambda: RotatingKVCache(max_size=window) if window else KVCache()))
    cache = store.batch()[0]
    mask = cache.make_mask(1, window_size=span)
    new = mx.array([float(length) for length in lengths]).reshape(-1, 1, 1, 1)
    keys = np.array(cache.update_and_fetch(new, new)[0])[:, 0, :, 0]
    assert keys.shape[1] == min(max(lengths) + 1, window or 99)
    seen = np.ones_like(keys, dtype=bool) if mask is None else np.array(mask)[:, 0, 0]
    for row, length in enumerate(lengths):  # each key holds its own position
        first = max(0, length + 1 - min(window or 99, span or 99))
        assert sorted(keys[row][seen[row]]) == list(range(first, length + 1))


def test_fallback_rows_move_like_kv_buffer_rows() -> None:
    def caches(start: float) -> list[Any]:
        state = ArraysCache(1)
        state[0] = mx.full((1, 2), start)
        return [*numbers(2, start), CacheList(state)]

    store = KVStore(lambda: [KVCache(), CacheList(ArraysCache(1))])
    for i, name in enumerate("abcd"):
        store.join(name, caches(float(i)))
    store.leave("b")
    store.leave("a")
    assert store.ids == ["c", "d"]
    check_store(store)
    assert store.batch()[1][0][0].tolist() == [[2, 2], [3, 3]]
    assert store.extract("d")[1][0][0].tolist() == [[3, 3]]
    store.leave("c")
    store.leave("d")
    assert store.nbytes == 0


def test_caches_of_every_kind_grow_once_to_a_length_that_is_known() -> None:
    plain, listed, grouped = KVCache(), KVCache(), GroupedKVCache(Groups(8, 32))
    reserve([plain, CacheList(listed), grouped], 700)
    chunk = mx.zeros((1, 1, 300, 32))
    for cache in (plain, listed, grouped) * 2:
        cache.update_and_fetch(chunk, chunk)
    assert [plain.keys.shape[2], listed.keys.shape[2], grouped.keys[0].shape[2]] == [700] * 3


def test_misuse_is_refused() -> None:
    store = KVStore(lambda: [KVCache()])
    with pytest.raises(ValueError, match="empty"):
        store.batch()
    with pytest.raises(ValueError, match="before its prefill"):
        store.join("a", [KVCache()])
    store.join("a", numbers(2, 0.0))
    with pytest.raises(ValueError, match="already"):
        store.join("a", numbers(2, 0.0))
    with pytest.raises(ValueError, match="2 caches for 1"):
        store.join("b", [*numbers(2, 0.0), *numbers(2, 0.0)])
    with pytest.raises(KeyError):
        store.leave("b")
    cache = store.batch()[0]
    with pytest.raises(RuntimeError, match="before the forward pass"):
        store.batch()
    with pytest.raises(RuntimeError, match="decode step of 1 x 1"):
        cache.update_and_fetch(mx.zeros((2, 1, 1, 1)), mx.zeros((2, 1, 1, 1)))


@pytest.mark.parametrize("make", [QuantizedKVCache, lambda: RotatingKVCache(max_size=8, keep=4)])
def test_cache_kinds_without_a_batch_form_are_refused(make: Callable[[], Any]) -> None:
    with pytest.raises(UnsupportedModel, match="KVCache cannot be decoded in a batch"):
        KVStore(lambda: [make()])
