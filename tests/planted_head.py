"""Models with a draft head of their own, random or planted: one that guesses right after a part of the tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from tandem.json_types import JsonObject
from tandem.models.families.table import family_of
from tandem.models.mtp import NORM, Paths, stored_name
from tandem.testing import random_weights

_FIRST = 16
"""First token of those that follow one another in a model with a planted head."""


def add_mtp_head(directory: Path, *, right: float | None = None, seed: int = 0) -> Path:
    """Add a draft head to a model of `tiny_model` in one file, of a family with such heads; return its path.

    The head is random. With `right` the model's weights are replaced too: each token determines the next one, and the head
    predicts it after that part of the tokens, and another one after the others.
    """
    path = directory / "model.safetensors"
    settings: JsonObject = json.loads((directory / "config.json").read_text())
    loaded = mx.load(str(path))
    assert isinstance(loaded, dict)
    arrays: dict[str, mx.array] = dict(loaded)
    inner: JsonObject = settings.get("text_config", settings)
    family, count, width, vocab = settings["model_type"], inner["num_hidden_layers"], inner["hidden_size"], inner["vocab_size"]
    layers = family_of(family).layers
    paths, rng = Paths.of(layers), np.random.default_rng(seed)
    dtype, layer = arrays[f"{paths.norm}.weight"].dtype, stored_name(family, count, "")
    one = {**inner, "num_hidden_layers": 1, "first_k_dense_replace": 0, "full_attention_interval": 1}
    one |= {"hybrid_override_pattern": ["*", "E"]} if family == "nemotron_h" else {}
    one = {**settings, "text_config": one} if "text_config" in settings else one
    made = random_weights(one, quantized=False, seed=seed, dtype=str(dtype).removeprefix("mlx.core."))
    own = {name.removeprefix(f"{layers}."): array for name, array in made.items() if name.startswith(layers)}
    arrays |= {layer.replace(".0.", f".{name[0]}.") + name[2:]: array for name, array in own.items()}
    join = f"{stored_name(family, count, 'eh_proj')}.weight"
    new: dict[str, Any] = {f"{stored_name(family, count, name)}.weight": np.ones(width) for name in ("enorm", "hnorm", NORM)}
    new[join] = rng.standard_normal((width, 2 * width)) / width**0.5
    if right is not None:
        last = {"o_proj", "down_proj", "out_proj", "fc2"}
        arrays |= {name: mx.zeros_like(array) for name, array in arrays.items() if last & {*name.split(".")}}
        embedding: np.ndarray[Any, Any] = rng.standard_normal((vocab, width))
        follower = np.full(vocab, _FIRST)
        order = _FIRST + rng.permutation(vocab - _FIRST)
        follower[order] = np.roll(order, -1)
        output = rng.standard_normal((vocab, width)) / 10
        output[follower[order]] = embedding[order]
        output[:, 0], embedding[:, 0] = 0, 4 * (rng.random(vocab) >= right)  # marks the tokens after which the head is wrong
        new[join] = np.eye(width, 2 * width)
        new[join][:, 0] = 4 * embedding[_FIRST]
        new |= {f"{path}.weight": array for path, array in zip(paths, (np.ones(width), embedding, output), strict=True)}
    arrays |= {name: mx.array(array).astype(dtype) for name, array in new.items()}
    mx.save_safetensors(str(path), arrays, {"format": "mlx"})
    return directory
