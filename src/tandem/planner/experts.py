"""How much of a mixture-of-experts model is experts, from config.json and the headers of its weights. No mlx."""

from __future__ import annotations

import re
from typing import Any

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.index import read_headers
from tandem.models.description import ModelDescription, part_of_tensor, text_config
from tandem.models.quantization import loaded_bytes, read_quantization
from tandem.planner.types import Experts

_COUNT = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")
ROUTED = re.compile(r"\.(?:experts|switch_mlp|switch_glu|input_linear|output_linear)\.")
"""Paths of routed experts, as they are stored and as mlx-lm joins them."""


def read_experts(files: ModelFiles, description: ModelDescription) -> Experts | None:
    """The routed experts of a model, None for a dense one. Raises `BrokenModel`."""
    config = text_config(read_config(files.path))
    count, used = _first(config, _COUNT), _first(config, _USED)
    if not count or not used or used > count:
        return None
    layers = [0] * description.num_layers
    tensors = {name: tensor for header in read_headers(files).values() for name, tensor in header.items()}
    for name, nbytes in loaded_bytes(tensors, read_quantization(config, files.name).foreign).items():
        part = part_of_tensor(name, len(layers))
        if isinstance(part, int) and ROUTED.search(name):
            layers[part] += nbytes
    return Experts(count=count, used=used, layer_bytes=tuple(layers)) if any(layers) else None


def _first(config: dict[str, Any], names: tuple[str, ...]) -> int:
    return next((config[n] for n in names if isinstance(config.get(n), int)), 0)
