"""Between which layers a model cannot be cut into stages, told from config.json. No mlx."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHARED_BY_DEFAULT = {"gemma4": 20, "gemma4_text": 20, "gemma4_unified": 20}


def uncut(config: Mapping[str, Any], num_layers: int) -> frozenset[int]:
    """Layers that must stay in one stage with the layer before them. `config` is that of the text model.

    These are layers that take keys and values from an earlier one: Gemma 3n and 4 (the last layers, from two before
    them), and Hunyuan (each from the first of its group).
    """
    kind = config.get("model_type")
    shared = config.get("num_kv_shared_layers", _SHARED_BY_DEFAULT.get(str(kind), 0))
    if isinstance(shared, int) and 0 < shared < num_layers:
        first = num_layers - shared
        kinds = config.get("layer_types") or _gemma4_kinds(config, num_layers)
        sources = {kinds[i]: i for i in range(first)}
        return frozenset(range(min(sources[one] for one in set(kinds[first:])) + 1, num_layers))
    if kind == "hunyuan" and config.get("use_cla"):
        return frozenset(i for i in range(num_layers) if i % int(config["cla_share_factor"]))
    return frozenset()


def _gemma4_kinds(config: Mapping[str, Any], num_layers: int) -> list[str]:
    size = int(config.get("sliding_window_pattern", 5))
    return ["full" if (i + 1) % size == 0 else "sliding" for i in range(num_layers)]
