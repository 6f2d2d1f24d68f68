"""Staged forward passes against the own model of mlx-lm or mlx-vlm, bit for bit."""

from __future__ import annotations

from copy import deepcopy

import mlx.core as mx
import numpy as np
import pytest

from tandem.checkpoints.resolve import resolve
from tandem.loading.stage import load_stage
from tandem.models.description import describe
from tandem.models.families.tiny import TINY
from tandem.models.partition import split_layers
from tandem.runner.kv_store import KVStore, make_store
from tandem.testing import tiny_model
from their_models import load_theirs

PROMPT = [3 + (7 * i * i + 5 * i) % 290 for i in range(27)]  # longer than the windows of tiny models
CHUNKS = [11, 16]
DECODE = 6
ROWS = [PROMPT[:19], PROMPT[5:8], PROMPT[2:12]]


def reference(path, dtype, dequantize):
    model, logits, make_caches, expanded = load_theirs(path)
    keep = getattr(model, "cast_predicate", None) or (lambda name: True)
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
        expanded(model)
    cache = make_caches(model)
    return lambda tokens: logits(tokens, cache=cache)


def load_parts(path, stages, dtype="float32", dequantize=False):
    files = resolve(str(path))
    description = describe(files)
    return [
        load_stage(files, description, r, dtype=dtype, dequantize=dequantize)
        for r in split_layers(description.num_layers, stages, uncut=description.uncut)
    ]


def through(parts, caches, tokens):
    h = mx.array(tokens, mx.int32)
    for part, cache in zip(parts, caches, strict=True):
        h = part.forward(h, cache)
        assert h.dtype == part.dtype
    return h


def assert_equal_runs(path, *layouts, dequantize=False):
    """The same logits from each of `layouts`, parts of the model at `path`, as from the model."""
    theirs = reference(path, layouts[0][0].dtype, dequantize)
    caches = [[part.make_caches() for part in parts] for parts in layouts]
    steps = [PROMPT[: CHUNKS[0]], PROMPT[CHUNKS[0] :]]
    assert [len(s) for s in steps] == CHUNKS
    for i in range(len(CHUNKS) + DECODE):
        want = theirs(mx.array([steps[i]], mx.int32))
        assert mx.all(mx.isfinite(want)).item()
        for parts, own in zip(layouts, caches, strict=True):
            got = parts[-1].head(through(parts, own, [steps[i]]))
            assert got.dtype == want.dtype
            assert mx.array_equal(got, want).item(), f"{len(parts)} stages, step {i}: {mx.max(mx.abs(got - want)).item()}"
        steps.append([mx.argmax(want[0, -1]).item()])


def assert_rows_run_together(parts):
    """Three sequences of different lengths in one decode step, against each of them alone."""
    stores, want = [make_store(part.make_caches, 0, part.one_by_one) for part in parts], []
    for number, prompt in enumerate(ROWS):
        caches = [part.make_caches() for part in parts]
        through(parts, caches, [prompt])
        for store, own in zip(stores, caches, strict=True):
            store.join(str(number), own if isinstance(store, KVStore) else deepcopy(own), len(prompt))
        want.append(parts[-1].head(through(parts, caches, [[number + 7]]))[0, -1])
    got = parts[-1].head(through(parts, [store.batch() for store in stores], [[7], [8], [9]]))[:, -1]
    np.testing.assert_allclose(np.array(got), np.array(mx.stack(want)), rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize("family", sorted(TINY))
def test_plain_weights(family, tmp_path):
    path = tiny_model(tmp_path, family)
    description = describe(resolve(str(path)))
    most = min(description.num_layers - len(description.uncut), 3)
    layouts = [load_parts(path, stages) for stages in sorted({1, most})]  # packed weights have two
    assert_equal_runs(path, *layouts)
    for parts in layouts:
        assert_rows_run_together(parts)


@pytest.mark.parametrize("family", sorted(TINY))
def test_quantized_weights_stay_packed_or_are_expanded(family, tmp_path):
    path = tiny_model(tmp_path, family, quantized=True)
    assert_equal_runs(path, load_parts(path, 2))
    assert_equal_runs(path, load_parts(path, 2, dequantize=True), dequantize=True)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "ministral3"])
def test_half_precision_as_stored(family, tmp_path):
    path = tiny_model(tmp_path, family, shards=3)
    assert_equal_runs(path, load_parts(path, 2, dtype="bfloat16"))


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_states_of_earlier_layers_reach_the_last_stage(family, tmp_path):
    """Each is what the model has when it is cut behind that layer, in any layout, with a chunk after another and in batches."""
    path, captured, found = tiny_model(tmp_path, family), (0, 1, 2), []
    for stages in (1, 2, 3):
        parts = load_parts(path, stages)
        plain, caches = ([part.make_caches() for part in parts] for _ in range(2))
        bare = [through(parts, plain, [PROMPT[:11]]), through(parts, plain, [PROMPT[11:]])]
        for part in parts:
            part.capture(captured)
        width = bare[0].shape[-1]
        assert [part.hidden_size for part in parts[1:]] == [width * (1 + part.layers.start) for part in parts[1:]]
        states = [through(parts, caches, [PROMPT[:11]]), through(parts, caches, [PROMPT[11:]])]
        assert all(mx.array_equal(one[..., :width], two).item() for one, two in zip(states, bare, strict=True))
        assert mx.array_equal(parts[-1].head(states[0]), parts[-1].head(bare[0])).item()
        found.append(mx.concatenate(states, axis=1)[..., width:])
        assert_rows_run_together(parts)
    assert found[0].shape == (1, len(PROMPT), 3 * width)
    assert all(mx.array_equal(one, found[0]).item() for one in found[1:])
    cuts = load_parts(path, 4)
    for count in (1, 2, 3):
        own = found[0][..., (count - 1) * width : count * width]
        chunks = [[part.make_caches() for part in cuts[:count]]]
        alone = [through(cuts[:count], chunks[0], [PROMPT[:11]]), through(cuts[:count], chunks[0], [PROMPT[11:]])]
        assert mx.array_equal(own, mx.concatenate(alone, axis=1)).item()


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
