"""Every kind of cache in a batch: rows that join, leave and move, and cached prefixes, against sequences by themselves."""

from __future__ import annotations

import random
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from kv_invariants import check_store
from stages import tiny_stage
from tandem.errors import BatchDesync, UnsupportedModel
from tandem.kv.store import Layers, unsupported
from tandem.loading.prefix import STORABLE, Prefix, kinds_of, members, trimmable
from tandem.loading.stage import StageModel
from tandem.runner import kv_store
from tandem.runner.kv_store import KVStore, RowsApart, make_store, may_idle
from tandem.runner.prefix_store import PrefixStore
from tandem.runner.prompt_rows import PromptRows, joined, rows_of
from tandem.runner.runner import Runner

KINDS = {
    "deepseek_v3": "latent",
    "deepseek_v32": "latent and index",
    "qwen3_next": "delta rule",
    "kimi_linear": "delta rule and latent",
    "granitemoehybrid": "Mamba 2 and attention",
    "mamba2": "Mamba 2",
    "nemotron_h": "layers without a cache",
    "lfm2": "convolution",
    "baichuan_m1": "lists",
    "rwkv7": "RWKV",
    "recurrent_gemma": "recurrent and window",
    "longcat_flash": "two latents",
    "llama4": "chunks",
    "gemma2": "scores by group",
    "step3p5": "windows",
    "mistral4": "scaled latent",
    "ministral3": "scaled by position",
    "jamba": "Mamba",
    "laguna": "windows and gates",
    "falcon_h1": "Mamba 2 beside attention",
    "minimax_m3_vl": "keys of an index",
    "longcat_flash_ngram": "last tokens",
    "kimi_k3": "delta rule and earlier outputs",
    "gemma4": "shared keys",
    "bailing_hybrid": "lightning",
    "nemotron-nas": "a layer that keeps nothing",
    "mimo_v2_flash": "windows with heads of their own",
    "hy_v4": "an index that layers share",
    "deepseek_v4": "compressed keys, and tokens for later stages",
    "qwen4_exp": "blocks of an index, n-grams and states",
    "glm5_next": "pools of an index, and mlx-vlm's states",
}


@pytest.fixture(scope="module", params=KINDS)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StageModel:
    return tiny_stage(tmp_path_factory.mktemp("model"), request.param, dtype="float32")


class Alone:
    """A sequence with caches of its own."""

    def __init__(self, stage: StageModel) -> None:
        self.stage, self.caches, self.length = stage, stage.make_caches(), 0

    def feed(self, tokens: list[int]) -> np.ndarray:
        h = self.stage.forward(mx.array([tokens]), self.caches)
        logits = self.stage.head(h[:, -1:])[0, -1]
        mx.eval(logits, [cache.state for cache in self.caches])
        self.length += len(tokens)
        return np.array(logits)


def prefilled(stage: StageModel, prompt: list[int], chunk: int) -> Alone:
    alone = Alone(stage)
    for start in range(0, len(prompt), chunk):
        alone.feed(prompt[start : start + chunk])
    return alone


def test_prompts_padded_behind_in_one_pass_are_those_alone(stage: StageModel) -> None:
    if stage.one_by_one:
        pytest.skip("its rows are computed apart")
    rng = random.Random(4)
    prompts = [[rng.randrange(300) for _ in range(length)] for length in (40, 44, 37, 41)]
    padded = mx.array([prompt + [0] * (44 - len(prompt)) for prompt in prompts])
    together = stage.forward(padded, stage.make_caches())
    for row, prompt in enumerate(prompts):
        alone = stage.forward(mx.array([prompt]), stage.make_caches())
        assert np.array(together[row, : len(prompt)]) == pytest.approx(np.array(alone[0]), abs=2e-4)


def test_chunks_computed_in_one_pass_leave_the_caches_of_each_alone(stage: StageModel) -> None:
    rows = PromptRows.of(stage)
    if not rows.positions:
        pytest.skip("each of its prompts has a pass of its own")
    rng = random.Random(5)
    counts = (9, 11, 10) if rows.padded else (10, 10, 10)
    prompts = [[rng.randrange(300) for _ in range(4 + count)] for count in counts]
    first = stage.make_caches()
    stage.forward(mx.array([prompt[:4] for prompt in prompts]), first)
    second = [joined(one) for one in zip(*(rows_of(first, [i], [4]) for i in range(3)), strict=True)]
    stage.forward(mx.array([prompt[4:] + [0] * (4 + max(counts) - len(prompt)) for prompt in prompts]), second)
    for i, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        again = Alone(stage)
        again.caches = rows_of(second, [i], [4 + count])
        alone = prefilled(stage, prompt, 4)
        for token in (5, 9):
            np.testing.assert_allclose(again.feed([token]), alone.feed([token]), rtol=1e-3, atol=2e-4)


def test_rows_of_a_shared_pass_join_together_as_one_by_one(stage: StageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "IDLE", 1)
    rows = PromptRows.of(stage)
    if not rows.positions:
        pytest.skip("each of its prompts has a pass of its own")
    rng = random.Random(6)
    lengths = (9, 11, 10, 11, 8) if rows.padded else (10,) * 5
    prompts = [[rng.randrange(300) for _ in range(length)] for length in lengths]
    shared = stage.make_caches()
    stage.forward(mx.array([prompt + [0] * (max(lengths) - len(prompt)) for prompt in prompts]), shared)
    together, apart = (KVStore(stage.make_caches) for _ in range(2))
    for store in (together, apart):
        store.idles = all(map(may_idle, stage.make_caches()))
        for name in ("x", "y", "z"):
            store.join(name, prefilled(stage, [5, 6, 7], 3).caches, 3)
        store.leave("y")  # whose row is the first to be taken
    for sources in ([0, 1, 2, 3], [4]):
        ids, taken = [str(source) for source in sources], [lengths[source] for source in sources]
        together.join_rows(ids, rows_of(shared, sources, taken), taken)
        for source in sources:
            apart.join(str(source), rows_of(shared, [source], [lengths[source]]), lengths[source])
    check_store(together)
    assert together.rows == apart.rows
    tokens = mx.array([[7 + row] for row in range(len(apart.rows))])
    for _ in range(2):
        got, want = (np.array(stage.forward(tokens, store.batch())) for store in (together, apart))
        np.testing.assert_array_equal(got, want)


def test_rows_of_mixed_lengths_join_leave_and_move(stage: StageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_store, "IDLE", 2)
    rng = random.Random(3)
    micro_batches = [make_store(stage.make_caches, 0, stage.one_by_one) for _ in range(2)]
    micro_batches[0].idles = not stage.one_by_one and all(map(may_idle, stage.make_caches()))
    alone: dict[str, Alone] = {}
    for step in range(14):
        if step < 5 or step == 9:
            prompt = [rng.randrange(300) for _ in range((1, 40, 7, 17, 3, 23)[min(step, 5)])]
            micro_batches[0].join(str(step), prefilled(stage, prompt, 16).caches, len(prompt))
            alone[str(step)] = prefilled(stage, prompt, 16)
        if step in (6, 11):
            gone = micro_batches[0].ids[0]
            micro_batches[0].leave(gone)
            del alone[gone]
        if step in (7, 12):
            moved = micro_batches[0].ids[-1]
            micro_batches[1].join(moved, micro_batches[0].extract(moved), micro_batches[0].length(moved))
            micro_batches[0].leave(moved)
        for store in micro_batches:
            if not store.ids:
                continue
            tokens = [rng.randrange(300) for _ in store.ids]
            order, fed = store.rows, dict(zip(store.ids, tokens, strict=True))
            got = stage.head(stage.forward(mx.array([[fed.get(one, 0)] for one in order]), store.batch()))[:, -1]
            got = got[mx.array([row for row, one in enumerate(order) if one])]
            want = np.stack([alone[one].feed([token]) for one, token in zip(store.ids, tokens, strict=True)])
            np.testing.assert_allclose(np.array(got), want, rtol=1e-3, atol=2e-4)
            assert [store.length(one) for one in store.ids] == [alone[one].length for one in store.ids]
            check_store(store)


def test_a_cached_prefix_is_taken_up_again_and_again(stage: StageModel) -> None:
    prompt = [3 + 7 * i % 290 for i in range(32)]
    first, prefixes = prefilled(stage, prompt, 32), PrefixStore()
    prefixes.save("p", first.caches, 32, 32)
    want = first.feed([5])
    for _ in range(2):
        again = Alone(stage)
        again.caches = prefixes.restore("p", 32)
        assert np.array_equal(again.feed([5]), want)
        again.feed([9])
    one = prefixes.nbytes
    prefixes.save("twice", prefixes.restore("p", 32), 32, 32)
    assert prefixes.nbytes == 2 * one > 0
    prefixes.evict("p")
    prefixes.evict("twice")
    assert prefixes.nbytes == 0
    if trimmable(first.caches):
        return
    with pytest.raises(BatchDesync, match="the cache holds 33"):
        prefixes.save("q", first.caches, 33, 32)


def test_a_prefix_is_the_same_from_the_arrays_of_its_files(stage: StageModel) -> None:
    prompt = [3 + 7 * i % 290 for i in range(32)]
    first = prefilled(stage, prompt, 32)
    prefix = Prefix.of(first.caches, 32).copied()
    want, again = first.feed([5]), Alone(stage)
    if unsupported(stage.cache_members, stage.dtype):
        # Last tokens, which only the embedding has, and mlx-vlm's own classes.
        assert any(one.layer < 0 or type(one.cache) not in STORABLE for one in stage.cache_members)
        return
    heads = next((one.arrays[0][0][1] for one in stage.cache_members if type(one.cache) is KVCache), 1)
    kinds = kinds_of(stage.make_caches())
    layers = Layers(kinds, stage.cache_members, len(stage.layers), heads, stage.dtype, as_bytes=False)
    checkpoint = layers.checkpoint(prefix, 32)
    assert checkpoint is not None and layers.checkpoint(prefix, 64) is None
    if any(type(one) is RotatingKVCache for one in members(stage.make_caches())):
        rows = KVStore(stage.make_caches, drafts=3)  # with more positions of a window
        rows.join("row", prefix.revived(32), 32)
        of_row = layers.checkpoint(Prefix.of(rows.extract("row"), 32), 32)
        assert of_row is not None and all(map(mx.array_equal, sum(of_row, []), sum(checkpoint, [])))
    again.caches = layers.revived(layers.stored(prefix, slice(0, 32)), checkpoint, 32).revived(32)
    assert np.array_equal(again.feed([5]), want)


def test_rows_whose_rotary_embedding_changes_with_their_length_are_computed_apart(tmp_path: Path) -> None:
    scaling = {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}
    stage = tiny_stage(tmp_path, "internlm2", dtype="float32", config={"rope_scaling": scaling, "max_position_embeddings": 32})
    store, prompts = make_store(stage.make_caches, 0, stage.one_by_one), ([5] * 3, [7] * 40)
    for number, prompt in enumerate(prompts):
        store.join(str(number), prefilled(stage, prompt, 64).caches, len(prompt))
    got = stage.head(stage.forward(mx.array([[9], [9]]), store.batch()))[:, -1]
    want = np.stack([prefilled(stage, prompt, 64).feed([9]) for prompt in prompts])
    np.testing.assert_allclose(np.array(got), want, rtol=1e-3, atol=2e-4)
    with pytest.raises(UnsupportedModel, match="dynamic rope"):
        Runner(stage, micro_batches=1, vocab_size=stage.vocab_size, eos_token_ids=(2,), drafts=3)


@pytest.mark.parametrize("family", ["qwen3_next", "mamba2", "recurrent_gemma", "falcon_h1", "baichuan_m1", "kimi_k3", "hy_v4"])
def test_rows_are_taken_back_to_any_of_a_steps_tokens_on_each_stage(family: str, tmp_path: Path) -> None:
    """Delta rule, Mamba 2, recurrent and window, states beside keys, lists, states and earlier outputs, an index: rows take up
    to 4 tokens a step, of which the first few count. Logits and states are those of one token at a time."""
    stages = [tiny_stage(tmp_path, family, dtype="float32", part=part) for part in (range(2), range(2, 4))]
    rng, stores = random.Random(4), [KVStore(stage.make_caches, 3) for stage in stages]
    alone: dict[str, list[Alone]] = {}

    def feed(name: str, token: int) -> None:
        x = mx.array([[token]])
        for one in alone[name]:
            x = one.stage.forward(x, one.caches)
            mx.eval(x, [cache.state for cache in one.caches])

    for step in range(7):
        if step in (0, 1, 4):
            name = str(step)
            alone[name] = [Alone(stage) for stage in stages]
            for token in (5, 9, 70 + step, 31):
                feed(name, token)
            for store, one in zip(stores, alone[name], strict=True):
                store.join(name, rows_of(one.caches, [0], [4]), 4)
        if step == 3:
            for store in stores:
                store.leave("0")
            del alone["0"]
        ids = stores[0].ids
        counts = [rng.randint(1, 4) for _ in ids]
        x = mx.array(tokens := [[rng.randrange(300) for _ in range(max(counts))] for _ in ids])
        for stage, store in zip(stages, stores, strict=True):
            x = stage.forward(x, store.batch(counts))
        got = np.array(stages[-1].head(x))
        for row, (name, count) in enumerate(zip(ids, counts, strict=True)):
            kept = rng.randint(1, count)
            for token in tokens[row][:kept]:
                feed(name, token)
            for store in stores:
                store.cut(name, store.length(name) - count + kept)
            assert np.isfinite(got[row, kept - 1]).all()
        if step in (2, 5, 6):
            for store, one in zip(stores, alone[ids[-1]], strict=True):
                for mine, theirs in zip(members(store.extract(ids[-1])), members(one.caches), strict=True):
                    if type(theirs) is ArraysCache:
                        for a, b in zip(mine.state[0], theirs.state[0], strict=True):
                            np.testing.assert_allclose(np.array(a), np.array(b), rtol=1e-3, atol=2e-4)
    for name, own in alone.items():
        x, y = mx.array([[7]]), mx.array([[7]])
        for store, one in zip(stores, own, strict=True):
            x, y = one.stage.forward(x, store.extract(name)), one.stage.forward(y, one.caches)
        np.testing.assert_allclose(np.array(x), np.array(y), rtol=1e-3, atol=2e-4)


def test_a_draft_models_states_are_taken_back_over_several_steps(tmp_path: Path) -> None:
    stage = tiny_stage(tmp_path, "mamba2", dtype="float32")
    for kept in range(1, 5):
        store, own = KVStore(stage.make_caches, 3, over_steps=True), prefilled(stage, [5, 6, 7], 3)
        store.join("a", prefilled(stage, [5, 6, 7], 3).caches, 3)
        stage.forward(mx.array([[9, 10]]), store.batch([2]))
        for token in (11, 12):
            stage.forward(mx.array([[token]]), store.batch())
        own.feed([9, 10, 11, 12][:kept])
        store.cut("a", 3 + kept)
        got = stage.head(stage.forward(mx.array([[8]]), store.batch()))[0, -1]
        np.testing.assert_allclose(np.array(got), own.feed([8]), rtol=1e-3, atol=2e-4)


def test_drafts_are_refused_where_they_cannot_be_taken_back(tmp_path: Path) -> None:
    stage = tiny_stage(tmp_path, "longcat_flash_ngram")
    with pytest.raises(UnsupportedModel, match="one by one"):
        make_store(stage.make_caches, 3, stage.one_by_one)
    assert isinstance(make_store(stage.make_caches, 0, stage.one_by_one), RowsApart)
