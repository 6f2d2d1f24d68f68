"""Models of config.json's types, by the package that the family table names (mlx)."""

from __future__ import annotations

import importlib
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import mlx.nn as nn

from tandem.checkpoints.config import nested_text
from tandem.json_types import JsonObject
from tandem.loading.text_tower import TextTower, build_whole
from tandem.models.description import of_vision
from tandem.models.families.table import family_of, module_of
from tandem.models.sources import require_source

_ROOTS = ("model.", "language_model.", "model.")
"""Prefixes of a nested text model's weights."""


def build_model(config: JsonObject) -> nn.Module:
    """Build the model of a config.json with random weights, which stay lazy and are never computed.

    Raise one of mlx_lm_models.FAILURES for invalid entries, UnsupportedModel if the package is not installed.
    """
    name = str(config["model_type"])
    family, model = family_of(name), nn.Module()
    if family.source == "mlx_vlm":
        require_source(name)
        model = TextTower(build_whole(config, module_of(name)))
    else:
        module = importlib.import_module(f"mlx_lm.models.{module_of(name)}")
        if family.nested:
            config = {**family.defaults, **config, **nested_text(config)}
            config |= config.get("rope_parameters") or {}
            config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        model = module.Model(module.ModelArgs.from_dict(config))
        if family.nested:
            model = TextTower(SimpleNamespace(language_model=model, sanitize=partial(_nested, model)))
    model.eval()
    return model


def _nested(text: Any, weights: dict[str, Any]) -> dict[str, Any]:
    """Return the weights of a nested text model as its module takes them, from names of transformers or mlx-vlm."""
    bare = {reduce(str.removeprefix, _ROOTS, name): array for name, array in weights.items() if not of_vision(name)}
    named = {name if name.startswith("lm_head.") else f"model.{name}": array for name, array in bare.items()}
    return {f"language_model.{name}": array for name, array in getattr(text, "sanitize", dict)(named).items()}
