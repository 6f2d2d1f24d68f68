"""Staged forward passes against mlx-lm's own model, bit for bit."""

from __future__ import annotations

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import dequantize_model, load_model

from tandem.checkpoints.resolve import resolve
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.families.tiny import TINY
from tandem.models.partition import split_layers
from tandem.testing import tiny_model

PROMPT = [3 + (7 * i * i + 5 * i) % 290 for i in range(27)]  # longer than the windows of tiny models
CHUNKS = [11, 16]
DECODE = 6


def reference(path, dtype, dequantize):
    model, _ = load_model(path)
    keep = getattr(model, "cast_predicate", lambda name: True)
    model.apply_to_modules(
        lambda name, m: m.update(
            {
                k: v.astype(dtype)
                for k, v in m.items()
                if isinstance(v, mx.array)
                and not k.startswith("_")
                and mx.issubdtype(v.dtype, mx.floating)
                and keep(f"{name}.{k}")
            }
        )
    )
    if dequantize:
        dequantize_model(model)
    cache = make_prompt_cache(model)
    return lambda tokens: model(tokens, cache=cache)


def staged(path, stages, dtype, dequantize):
    files = resolve(str(path))
    description = describe(files)
    parts = [
        load_stage(files, description, r, dtype=dtype, dequantize=dequantize)
        for r in split_layers(description.num_layers, stages, uncut=description.uncut)
    ]
    caches = [part.make_caches() for part in parts]

    def forward(tokens):
        h = tokens
        for part, cache in zip(parts, caches, strict=True):
            h = part.forward(h, cache)
            assert h.dtype == part.dtype
        return parts[-1].head(h)

    return forward


def assert_equal_runs(path, stages, dtype="float32", dequantize=False):
    ours, theirs = staged(path, stages, dtype, dequantize), reference(path, getattr(mx, dtype), dequantize)
    steps = [PROMPT[: CHUNKS[0]], PROMPT[CHUNKS[0] :]]
    assert [len(s) for s in steps] == CHUNKS
    for i in range(len(CHUNKS) + DECODE):
        tokens = mx.array([steps[i]], mx.int32)
        got, want = ours(tokens), theirs(tokens)
        assert got.dtype == want.dtype
        assert mx.all(mx.isfinite(want)).item()
        assert mx.array_equal(got, want).item(), f"step {i}: {mx.max(mx.abs(got - want)).item()}"
        steps.append([mx.argmax(got[0, -1]).item()])


@pytest.mark.parametrize("family", sorted(TINY))
def test_plain_weights(family, tmp_path):
    path = tiny_model(tmp_path, family)
    description = describe(resolve(str(path)))
    for stages in range(1, min(description.num_layers - len(description.uncut), 3) + 1):
        assert_equal_runs(path, stages)


@pytest.mark.parametrize("family", sorted(TINY))
def test_quantized_weights_stay_packed_or_are_expanded(family, tmp_path):
    path = tiny_model(tmp_path, family, quantized=True)
    assert_equal_runs(path, 2)
    assert_equal_runs(path, 2, dequantize=True)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "ministral3"])
def test_half_precision_as_stored(family, tmp_path):
    path = tiny_model(tmp_path, family, shards=3)
    assert_equal_runs(path, 2, dtype="bfloat16")


@pytest.mark.parametrize("family", sorted(TINY))
def test_description_agrees_with_what_is_loaded(family, tmp_path):
    files = resolve(str(tiny_model(tmp_path, family)))
    description = describe(files)
    seen = []
    stages = [
        load_stage(files, description, r, dtype="bfloat16", progress=lambda done, total: seen.append((done, total)))
        for r in split_layers(description.num_layers, 2, uncut=description.uncut)
    ]
    tied = description.embed_bytes if description.tied_head else 0
    expected = sum(description.layer_bytes) + description.embed_bytes + description.head_bytes + tied
    assert sum(stage.nbytes for stage in stages) == expected
    assert seen[-1][0] == seen[-1][1] == stages[-1].nbytes
    assert [s.is_first for s in stages] == [True, False]
    assert [s.is_last for s in stages] == [False, True]
