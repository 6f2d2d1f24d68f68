"""Fused projections: the same tokens as without, fewer products, no second copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from tandem.checkpoints.resolve import resolve
from tandem.loading import fusion
from tandem.loading.fusion import FusedPart, fuse_projections
from tandem.loading.stage import StageModel, load_stage
from tandem.models.description import describe
from tandem.models.partition import split_layers
from tandem.models.shard import plan_shards
from tandem.testing import tiny_model
from thread_ranks import ThreadGroup
from wide import wide_figures

PROMPT = [3 + (7 * i * i + 5 * i) % 290 for i in range(27)]
CHUNKS = (PROMPT[:11], PROMPT[11:], [17], [5])


def load(path: Path, layers: range | None = None, **options: Any) -> StageModel:
    files = resolve(str(path))
    description = describe(files)
    return load_stage(files, description, layers or range(description.num_layers), dtype="float32", **options)


def logits(stages: Sequence[StageModel]) -> np.ndarray:
    """Of all positions: a prompt in two chunks, then single tokens."""
    caches, found = [stage.make_caches() for stage in stages], []
    for chunk in CHUNKS:
        h = mx.array([chunk], mx.int32)
        for stage, cache in zip(stages, caches, strict=True):
            h = stage.forward(h, cache)
        found.append(np.array(stages[-1].head(h)))
    return np.concatenate(found, axis=1)


def parts(stage: StageModel, i: int = 0) -> set[str]:
    """Paths in a layer of the projections that are computed together with others."""
    return {path for path, module in stage.modules[i].named_modules() if type(module) is FusedPart}


def assert_alike(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-5) -> None:
    assert np.abs(got - want).max() < tolerance * np.abs(want).max()
    assert (got.argmax(-1) == want.argmax(-1)).all()


ATTENTION = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
DENSE = {*ATTENTION, "mlp.gate_proj", "mlp.up_proj"}
EXPECTED = {
    "llama": DENSE,
    "qwen2": DENSE,
    "gemma3n": DENSE,
    "phi3": set(),  # they are one in the files
    "qwen3_moe": {*ATTENTION, "mlp.switch_mlp.gate_proj", "mlp.switch_mlp.up_proj"},
    "gpt_oss": {*ATTENTION, "mlp.experts.gate_proj", "mlp.experts.up_proj"},
    "deepseek_v3": {"self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa", "mlp.gate_proj", "mlp.up_proj"},
}


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("family", EXPECTED)
def test_the_same_tokens_with_fewer_products(family, quantized, tmp_path):
    tiny_model(tmp_path, family, dtype="float32", quantized=quantized)
    stage = load(tmp_path, fuse=True)
    assert parts(stage) == EXPECTED[family]
    assert_alike(logits([stage]), logits([load(tmp_path)]))


@pytest.mark.parametrize("dequantize", [False, True])
@pytest.mark.parametrize(("family", "sizes"), [("llama", (3,)), ("llama", (2, 2)), ("qwen3_moe", (2,))])
def test_ranks_and_stages(family, sizes, dequantize, tmp_path):
    tiny_model(tmp_path, family, dtype="float32", quantized=True, config=wide_figures(family))
    description = describe(resolve(str(tmp_path)))
    shards = plan_shards(description, sizes[0], dequantize=dequantize)
    ranges = split_layers(description.num_layers, len(sizes))
    want = logits([load(tmp_path, dequantize=dequantize)])

    def work(tp: Any) -> np.ndarray:
        stages = [
            load(tmp_path, layers, fuse=True, dequantize=dequantize, shard=shards[tp.rank], tensor_parallel=tp)
            for layers in ranges
        ]
        assert all(
            {"q_proj", "up_proj"} <= {path.rpartition(".")[2] for path in parts(stage, stage.layers.start)} for stage in stages
        )
        return logits(stages)

    for got in ThreadGroup(sizes[0]).run(work):
        assert_alike(got, want)


def test_what_all_ranks_have_is_not_fused_with_what_they_share(tmp_path):
    """Its rounding would depend on the width of a rank's part."""
    tiny_model(tmp_path, "deepseek_v3", dtype="float32", config={**wide_figures("deepseek_v3"), "q_lora_rank": None})
    shards = plan_shards(describe(resolve(str(tmp_path))), 2)
    both = {"self_attn.q_proj", "self_attn.kv_a_proj_with_mqa"}
    assert both <= parts(load(tmp_path, fuse=True))
    for found in ThreadGroup(2).run(lambda tp: parts(load(tmp_path, fuse=True, shard=shards[tp.rank], tensor_parallel=tp))):
        assert not both & found and "mlp.module.up_proj" in found


def test_there_is_one_copy_of_the_weights(tmp_path):
    tiny_model(tmp_path, dtype="float32", config={"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64})
    weights = 0
    for fuse in (False, True):
        mx.synchronize()
        before = mx.get_active_memory()
        stage = load(tmp_path, fuse=fuse)
        held = sum(array.nbytes for module in stage.modules.values() for _, array in tree_flatten(module.parameters()))
        active = mx.get_active_memory() - before
        assert held == stage.nbytes and active < 1.05 * held + 100_000
        assert weights in (0, held)
        weights = held
        logits([stage])  # after which nothing of a call is kept
        assert mx.get_active_memory() - before < 1.05 * held + 100_000
        del stage


def test_large_products_are_not_joined(tmp_path, monkeypatch):
    tiny_model(tmp_path, dtype="float32", config={"hidden_size": 64, "intermediate_size": 512, "head_dim": 16})
    monkeypatch.setattr(fusion, "_JOINED_BYTES", 2 * 64 * 512 * 4 - 1)
    joined = {
        path
        for module in load(tmp_path, fuse=True).modules.values()
        for path, one in module.named_modules()
        if isinstance(one, FusedPart)
    }
    assert joined and not [path for path in joined if "mlp" in path]


class Block(nn.Module):
    """A layer whose projections are alike only in part."""

    def __init__(self) -> None:
        super().__init__()
        mx.random.seed(0)
        self.a, self.b = nn.Linear(32, 8, bias=False), nn.Linear(32, 24, bias=False)
        self.biased = nn.Linear(32, 8)
        self.other, self.twice, self.read, self.idle, self.half = (nn.Linear(32, 8, bias=False) for _ in range(5))
        self.half.set_dtype(mx.bfloat16)
        self.packed, self.finer = (nn.QuantizedLinear(32, 8, bias=False, group_size=32, bits=bits) for bits in (4, 8))

    def __call__(self, x: mx.array) -> mx.array:
        assert self.read.weight.dtype == mx.float32
        outputs = [one(x) for one in (self.b, self.biased, self.half, self.a, self.twice, self.read, self.packed, self.finer)]
        return mx.concatenate([*outputs, self.other(x * 2), self.twice(x)], axis=-1)


def test_only_what_is_alike_is_fused():
    block, x = Block(), mx.random.normal((2, 3, 32))
    want = block(x)
    assert fuse_projections({0: block}, lambda: block(x)) == 1
    assert {path for path, module in block.named_modules() if type(module) is FusedPart} == {"a", "b"}
    assert mx.allclose(block(x), want, rtol=1e-5, atol=1e-5)


def test_a_part_that_is_asked_out_of_turn_computes_with_what_it_is_given():
    block, x, y = Block(), mx.random.normal((1, 32)), mx.random.normal((1, 32))
    a, b = block.a, block.b
    fuse_projections({0: block}, lambda: block(x))
    for module, plain, given in ((block.a, a, x), (block.b, b, y), (block.b, b, y), (block.a, a, x)):
        assert mx.allclose(module(given), plain(given), rtol=1e-5, atol=1e-6)
