"""Models of config.json's types, by the package that the family table names (mlx)."""

from __future__ import annotations

import importlib

import mlx.nn as nn

from tandem.json_types import JsonObject
from tandem.loading.text_tower import TextTower, build_whole
from tandem.models.families.table import family_of, module_of
from tandem.models.sources import require_source


def build_model(config: JsonObject) -> nn.Module:
    """Build the model of a config.json with random weights, which stay lazy and are never computed.

    Raise one of mlx_lm_models.FAILURES for invalid entries, UnsupportedModel if the package is not installed.
    """
    name = str(config["model_type"])
    model: nn.Module
    if family_of(name).source == "mlx_vlm":
        require_source(name)
        model = TextTower(build_whole(config, module_of(name)))
    else:
        module = importlib.import_module(f"mlx_lm.models.{module_of(name)}")
        model = module.Model(module.ModelArgs.from_dict(config))
    model.eval()
    return model
