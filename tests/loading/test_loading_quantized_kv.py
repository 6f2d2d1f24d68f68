"""Keys and values in groups: what a sequence's caches hold, what attention makes of them, and who keeps which."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache
from mlx_lm.utils import load_model

from tandem.checkpoints.resolve import resolve
from tandem.errors import UnsupportedModel
from tandem.loading.quantized_kv import GroupedKVCache, Groups, attend, quantized
from tandem.loading.stage import StageModel, load_stage
from tandem.models.description import describe
from tandem.models.families.tiny import tiny_config
from tandem.models.footprint import kv_bytes_per_token
from tandem.models.kv_types import require_quantizable
from tandem.testing import tiny_model

TOKENS = mx.array([[(7 * i * i + 3) % 500 for i in range(40)]])
WIDE = {"head_dim": 64}


def load(directory: Path, family: str, kv_dtype: str, dtype: str = "float32", **config: Any) -> StageModel:
    files = resolve(str(tiny_model(directory / family, family, dtype="float32", config=config)))
    description = describe(files)
    return load_stage(files, description, range(description.num_layers), dtype=dtype, kv_dtype=kv_dtype)


def logprobs(stage: StageModel, chunks: tuple[int, ...]) -> mx.array:
    caches, at, out = stage.make_caches(), 0, []
    for count in chunks:
        out.append(stage.head(stage.forward(TOKENS[:, at : at + count], caches)))
        at += count
    logits = mx.concatenate(out, axis=1)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def far(mine: mx.array, theirs: mx.array) -> float:
    return float(mx.abs(mine - theirs).max().item())


def off(mine: mx.array, theirs: mx.array) -> float:
    return float(mx.abs(mine - theirs).mean().item())


@pytest.mark.parametrize(("kv_dtype", "bits"), [("8bit", 8), ("4bit", 4)])
def test_one_sequence_is_as_mlx_lm_has_it(kv_dtype: str, bits: int, tmp_path: Path) -> None:
    stage = load(tmp_path, "llama", kv_dtype, head_dim=32)
    assert stage.quantized_layers == [0, 1, 2, 3]
    mine = logprobs(stage, (40,))
    model, _ = load_model(tmp_path / "llama")
    logits = model(TOKENS, cache=[QuantizedKVCache(32, bits) for _ in range(4)])
    # On average: sums in another order may give a number at the border of two codes the other one.
    assert off(mine, logits - mx.logsumexp(logits, axis=-1, keepdims=True)) < 2e-3
    assert off(mine, logprobs(stage, (25, 13, 1, 1))) < 2e-3  # whatever the chunks
    full = logprobs(load(tmp_path, "llama", "auto", head_dim=32), (40,))
    assert 5e-3 < off(mine, full) < {8: 0.1, 4: 1.0}[bits]


@pytest.mark.parametrize(
    ("family", "config", "layers"),
    [
        ("gpt_oss", WIDE, [1, 3]),  # windows, and attention with sinks
        ("qwen3_next", WIDE, [1, 3]),  # recurrent states
        ("mimo_v2_flash", WIDE | {"v_head_dim": 32, "swa_head_dim": 64, "swa_v_head_dim": 32}, [1, 3]),
        ("gemma4", {}, [2]),  # keys and values that later layers share
    ],
)
def test_full_attention_alone_is_quantised(family: str, config: dict[str, Any], layers: list[int], tmp_path: Path) -> None:
    if family == "gemma4":
        config = {"text_config": {**tiny_config(family)["text_config"], **WIDE, "global_head_dim": 64}}
    stage = load(tmp_path, family, "8bit", **config)
    description = describe(resolve(str(tmp_path / family)))
    assert stage.quantized_layers == layers == [i for i, (group, _) in enumerate(description.kv_groups) if group]
    for kind in ("float32", "bfloat16"):
        told = kv_bytes_per_token(description, description.num_layers, kind, gpu=False, kv_dtype="8bit")
        assert load(tmp_path, family, "8bit", kind, **config).cache_bytes.position == told
    full = logprobs(load(tmp_path, family, "auto", **config), (30, 10))
    assert 0 < off(logprobs(stage, (30, *[1] * 10)), full) < 0.1


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="gemma2 has no layer|computes with keys and values itself"):
        load(tmp_path, "gemma2", "8bit", **WIDE)
    for family in ("deepseek_v3", "llama"):  # latents; heads of 16
        stage = load(tmp_path, family, "8bit")
        assert stage.quantized_layers == []
        assert all(type(cache) is KVCache for cache in stage.make_caches())
        with pytest.raises(UnsupportedModel, match=f"--kv-dtype 8bit: {family} has no layer"):
            require_quantizable(describe(resolve(str(tmp_path / family))), "8bit")


@pytest.mark.parametrize("mask", ["none", "causal", "rows", "heads", "added"])
@pytest.mark.parametrize("sinks", [False, True])
def test_attention_is_that_over_expanded_keys(mask: str, sinks: bool) -> None:
    """Over rows of unequal lengths, with a head for each query and kv heads that are shared."""
    mx.random.seed(3)
    rows, heads, kv_heads, width, positions = 3, 6, 2, 4, 37
    queries = mx.random.normal((rows, heads, width, 64))
    keys, values = (quantized(mx.random.normal((rows, kv_heads, positions, 64)), Groups(8, 32)) for _ in range(2))
    lengths = mx.array([37, 12, 30])
    by_row = mx.arange(positions)[None, None, None] < (lengths[:, None] + mx.arange(width) - 3)[:, None, :, None]
    made: Any = {
        "none": None,
        "causal": "causal",
        "rows": by_row,
        "heads": mx.broadcast_to(by_row, (rows, heads, width, positions)),
        "added": mx.where(by_row, 0.0, -1e9),
    }[mask]
    more = mx.random.normal((heads,)) if sinks else None
    found = attend(queries, keys, values, scale=0.125, mask=made, sinks=more)
    right = mx.fast.scaled_dot_product_attention(queries, keys.expanded(), values.expanded(), scale=0.125, mask=made, sinks=more)
    assert far(found, right) < 1e-5


def test_a_fresh_cache_holds_nothing() -> None:
    cache = GroupedKVCache(Groups(8, 64))
    assert (cache.nbytes, cache.groups) == (0, (8, 64))
