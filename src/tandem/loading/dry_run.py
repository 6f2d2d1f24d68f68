"""Dry run of an unlisted architecture: does a tiny random model match mlx-lm when split into stages? (mlx)

`models/dry_run.py` calls `tried` in a sandbox. It runs a reduced model of a directory's config.json whole, and in one
to three stages.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten, tree_map_with_path

from tandem.checkpoints.config import read_config
from tandem.crash_guard import start_thread
from tandem.errors import TandemError, UnsupportedModel
from tandem.json_types import JsonObject
from tandem.loading.build_model import build_model
from tandem.loading.memory import resident_bytes
from tandem.loading.mlx_lm_models import import_models_only
from tandem.loading.pipeline_model import PipelineModel
from tandem.loading.quantized_kv import Cache
from tandem.loading.weights import one_line
from tandem.models.description import text_config
from tandem.models.families.shrink import shrunk
from tandem.models.families.table import family_of
from tandem.models.partition import split_layers, uncut
from tandem.processes.sandbox import EXIT_MEMORY

STEPS = (11, 16, 1, 1)
"""Tokens per call: two prompt chunks, together longer than tiny windows, and two decode steps."""
ROWS = 2
"""Sequences per call; some models work with one sequence and fail with a batch."""
ROUNDING = 1e-3
"""Largest difference between logits of batched rows and of single rows, relative to the largest logit."""
MOST_WEIGHTS = 60_000_000
MOST_BYTES = 4 * 10**9
"""Limit on memory in bytes, beyond the process's use at the start; far more than such models need."""


def cut_down(config: JsonObject) -> tuple[JsonObject, nn.Module]:
    """Return the reduced config and its model. Raise UnsupportedModel."""
    failed = "it cannot be cut down far enough to be tried"
    for small in shrunk(config):
        try:
            model = build_model(small)
        except Exception as error:  # noqa: BLE001 - mlx-lm's code on an untested config
            failed = f"cut down, its config makes no model: {one_line(error)}"
            continue
        if sum(array.size for _, array in tree_flatten(model.parameters())) <= MOST_WEIGHTS:
            return small, model
    raise UnsupportedModel(failed)


def try_config(config: JsonObject) -> str:
    """Return a line that describes what was compared. Raise UnsupportedModel with the difference, or the reason for no
    result."""
    small, model = cut_down(config)
    rows, want = _wanted(small, model)
    layers, family = len(model.layers), family_of(str(small.get("model_type")))
    fixed = uncut(text_config(small), layers)
    most = min(layers - len(fixed), 3)
    numbers = sorted({*range(1, most + 1), layers - len(fixed)})  # the last is cut wherever it can be
    layouts = [split_layers(layers, stages, uncut=fixed) for stages in numbers]
    theirs = {"mlx_lm": "mlx-lm", "mlx_vlm": "mlx-vlm"}[family.source]
    for split in layouts:
        frames = [PipelineModel(model, own, family) for own in split]
        stages = f"{len(split)} stages"
        for i, (alone, together, whole) in enumerate(zip(*_staged_logits(frames, rows), want, strict=True)):
            if not mx.array_equal(alone, whole).item():
                raise UnsupportedModel(
                    f"over {stages} the logits of call {i + 1} differ from {theirs}'s by {_distance(alone, whole):g}"
                )
            if not (by := _distance(together, whole)) <= ROUNDING * _distance(whole, mx.zeros(1)):
                raise UnsupportedModel(
                    f"over {stages} the logits of {ROWS} rows at once differ in call {i + 1} from those of each by {by:g}"
                )
    weights = sum(array.size for _, array in tree_flatten(model.parameters()))
    return f"{layers} layers and {weights:,} weights in up to {most} stages, and cut anywhere, agree with {theirs} in all bits"


def _wanted(config: JsonObject, model: nn.Module) -> tuple[mx.array, list[mx.array]]:
    """Give the model random weights. Return tokens [rows, n], and each call's logits [rows, n, V] of the whole model."""
    model.update(tree_map_with_path(_random, model.parameters()))
    mx.eval(model.parameters())
    rows = mx.random.randint(0, 256, (ROWS, sum(STEPS)), key=mx.random.key(1))
    frame = PipelineModel(model, range(len(model.layers)), family_of(str(config.get("model_type"))))
    make_caches = getattr(model, "own_caches", frame.make_caches)
    each = [_whole_logits(model, make_caches(), row) for row in rows]
    want = [mx.concatenate(list(calls)) for calls in zip(*each, strict=True)]
    if not all(mx.all(mx.isfinite(logits)).item() for logits in want):
        raise UnsupportedModel("cut down, it computes numbers that are not finite, so nothing can be compared")
    return rows, want


def _distance(a: mx.array, b: mx.array) -> float:
    by: Any = mx.max(mx.abs(a - b)).item()
    return float(by)


def _calls(row: mx.array) -> list[mx.array]:
    """Return the tokens [1, n] of each call."""
    return list(mx.split(row[None], np.cumsum(STEPS)[:-1].tolist(), axis=1))


def _whole_logits(model: nn.Module, caches: list[Cache], row: mx.array) -> list[mx.array]:
    logits = [model(x, cache=caches) for x in _calls(row)]
    mx.eval(logits)
    return logits


def _staged_logits(frames: list[PipelineModel], rows: mx.array) -> tuple[list[mx.array], list[mx.array]]:
    """Return the logits [rows, n, V] of each call: with the head applied to each row alone, and to all rows together.

    Layers run row by row, as in a batch whose sequences run one at a time.
    """
    caches = [[pipeline_model.make_caches() for pipeline_model in frames] for _ in rows]
    alone: list[mx.array] = []
    together: list[mx.array] = []
    for calls in zip(*map(_calls, rows), strict=True):
        hidden = []
        for x, own in zip(calls, caches, strict=True):
            for pipeline_model, cache in zip(frames, own, strict=True):
                x = pipeline_model.run(x, cache)
            hidden.append(x)
        alone.append(mx.concatenate([frames[-1].head(x) for x in hidden]))
        together.append(frames[-1].head(mx.concatenate(hidden)))
        mx.eval(alone[-1], together[-1])
    return alone, together


def _random(path: str, array: mx.array) -> mx.array:
    """Return random weights that depend only on path and shape."""
    key = mx.random.key(sum(path.encode()) % 2**31)
    if not mx.issubdtype(array.dtype, mx.floating):  # a table of experts, by token: zeros as it is made
        return array if mx.any(array).item() else mx.random.randint(0, 2, array.shape, array.dtype, key=key)
    noise = mx.random.normal(array.shape, key=key)
    return 1 + 0.1 * noise if array.ndim == 1 and path.endswith("weight") else noise / 8


def outcome(config: JsonObject) -> tuple[bool, str]:
    """Return whether the dry run passes, and a line that describes the comparison or the difference."""
    try:
        return True, try_config(config)
    except TandemError as error:
        return False, error.message
    except Exception as error:  # noqa: BLE001 - mlx-lm's code on an untested config
        return False, f"its forward pass fails: {type(error).__name__}: {one_line(error)}"


def _end_when_large() -> None:
    """Exit the process if it uses more than `MOST_BYTES`: a hostile config must not exhaust the machine's memory."""
    most = resident_bytes() + MOST_BYTES
    while max(resident_bytes(), mx.get_peak_memory()) < most:
        time.sleep(0.05)
    os.write(1, f"it takes more than {MOST_BYTES / 1e9:g} GB, cut down as it is\n".encode())
    os._exit(EXIT_MEMORY)


def tried(path: str) -> str:
    """Return the result line for the config in directory `path`. Raise TandemError. Run in a separate process."""
    start_thread(_end_when_large, name="memory")
    import_models_only()
    passed, line = outcome(read_config(Path(path)))
    if not passed:
        raise UnsupportedModel(line)
    return line
