"""Attention of decode steps that reads each row's own length: the seam for it, and the CUDA kernels."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_caches

from stages import tiny_stage
from tandem.runner import ragged_attention
from tandem.runner.kv_store import KVStore


class Counted:
    """The kernels' meaning in plain MLX, and how often it was asked for."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, queries, keys, values, lengths, longest, scale):
        self.calls += 1
        seen = mx.arange(keys.shape[2]) <= lengths[:, None]
        assert longest == int(lengths.max().item())
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=seen[:, None, None])


def decoded(stage, lengths: list[int], steps: int, attention) -> list[list[float]]:
    """Logits of rows of these lengths over some decode steps."""
    store = KVStore(stage.make_caches, attention=attention)
    for number, length in enumerate(lengths):
        caches = stage.make_caches()
        stage.forward(mx.array([[(7 * number + i) % 500 for i in range(length)]]), caches)
        store.join(str(number), caches)
    found = []
    for step in range(steps):
        tokens = mx.array([[step + number] for number in range(len(lengths))])
        found.append(stage.head(stage.forward(tokens, store.batch()))[:, 0].tolist())
    return found


@pytest.mark.parametrize(
    ("family", "config"), [("llama", {}), ("qwen3", {}), ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2})]
)
def test_a_cache_that_can_attend_does_so_in_every_family(tmp_path, family, config):
    stage = tiny_stage(tmp_path, family, dtype="float32", config=config)
    own = Counted()
    lengths = [3, 40, 9, 25]
    for mine, theirs in zip(decoded(stage, lengths, 5, own), decoded(stage, lengths, 5, None), strict=True):
        assert mx.allclose(mx.array(mine), mx.array(theirs), atol=1e-5)
    assert own.calls == 5 * 4


def test_on_a_cpu_rows_of_very_different_lengths_are_attended_to_by_length(tmp_path, monkeypatch):
    assert ragged_attention.chosen_attention("masked") is None
    if not ragged_attention.on_cpu():
        pytest.skip("about CPUs")
    attend, whole = ragged_attention.chosen_attention(), [20, 31, 600, 25, 22, 29, 20, 90]
    few = {"queries": mx.random.normal((8, 9, 1, 64)), "scale": 0.125}
    keys, values = (mx.random.normal((9, 3, 768, 64))[:8, :, :601] for _ in range(2))
    lengths = mx.array(whole, dtype=mx.int32)
    seen = (mx.arange(601) <= lengths[:, None])[:, None, None]
    expected = mx.fast.scaled_dot_product_attention(few["queries"], keys, values, scale=0.125, mask=seen)
    assert mx.allclose(attend(keys=keys, values=values, lengths=lengths, longest=600, **few), expected, atol=1e-6)
    near = mx.array([600] + 7 * [500], dtype=mx.int32)
    assert attend(keys=keys, values=values, lengths=near, longest=600, **few) is None

    monkeypatch.setattr(ragged_attention, "WASTE", 1)
    for family, config in (("llama", {}), ("gemma3_text", {"sliding_window": 16, "sliding_window_pattern": 2})):
        stage = tiny_stage(tmp_path / family, family, dtype="float32", config=config)
        for mine, theirs in zip(decoded(stage, [3, 40, 9, 25], 5, attend), decoded(stage, [3, 40, 9, 25], 5, None), strict=True):
            assert mx.allclose(mx.array(mine), mx.array(theirs), atol=1e-5)


def test_rows_of_one_length_are_left_to_mlx_until_they_are_long(tmp_path):
    stage = tiny_stage(tmp_path, dtype="float32")
    own = Counted()
    decoded(stage, [6, 6], 2, own)
    assert own.calls == 0


def test_a_single_sequences_cache_is_none_of_its_business():
    cache = mlx_caches.KVCache()
    assert not hasattr(cache, "attend")


def test_on_a_cpu_and_where_it_is_turned_off_there_is_none():
    assert ragged_attention.decode_attention("masked") is None
    if ragged_attention.on_cpu():
        assert ragged_attention.decode_attention() is None


@pytest.mark.skipif(not mx.cuda.is_available(), reason="the kernels are CUDA's")
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16, mx.float16])
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "dim", "longest"),
    [
        (1, 32, 8, 128, 5),
        (8, 32, 8, 128, 1100),
        (64, 32, 8, 128, 300),
        (3, 9, 3, 64, 77),
        (5, 8, 8, 256, 500),
        (4, 16, 1, 96, 9000),
        (2, 14, 2, 192, 400),
    ],
)
def test_kernels_compute_what_masked_attention_computes(dtype, rows, heads, kv_heads, dim, longest):
    mx.random.seed(rows)
    queries = mx.random.normal((rows, heads, 1, dim)).astype(dtype)
    kv_buffer = [mx.random.normal((rows + 2, kv_heads, longest + 30, dim)).astype(dtype) for _ in range(2)]
    keys, values = (part[:rows, :, :longest] for part in kv_buffer)
    lengths = mx.array([longest - 1 - (37 * row) % longest for row in range(rows)], dtype=mx.int32)
    mine = ragged_attention.attend(queries, keys, values, lengths, longest - 1, dim**-0.5)
    seen = (mx.arange(longest) <= lengths[:, None])[:, None, None]
    theirs = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=dim**-0.5, mask=seen)
    assert mine is not None
    close = 1e-5 if dtype == mx.float32 else 2e-2
    assert float(mx.abs(mine.astype(mx.float32) - theirs.astype(mx.float32)).max()) < close
