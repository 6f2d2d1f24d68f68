"""Random LoRA adapters for tiny models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path


def tiny_adapter(
    model: Path,
    directory: Path,
    *,
    keys: Sequence[str] = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"),
    layers: int = 4,
    rank: int = 4,
    scale: float = 2.5,
) -> Path:
    """Write a LoRA adapter for a tiny model's last `layers` as mlx-lm's training does, with random weights in both
    factors, and return its directory.
    """
    import mlx.core as mx
    import numpy as np
    from mlx.utils import tree_flatten
    from mlx_lm.tuner.utils import linear_to_lora_layers
    from mlx_lm.utils import load_model

    directory.mkdir(parents=True)
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": list(keys)}
    module, _ = load_model(model)
    linear_to_lora_layers(module, layers, parameters)
    rng = np.random.default_rng(5)
    arrays = {
        name: mx.array(rng.standard_normal(array.shape, dtype=np.float32) / 4)
        for name, array in tree_flatten(module.parameters())
        if name.endswith(("lora_a", "lora_b"))
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), arrays)
    config = {"fine_tune_type": "lora", "num_layers": layers, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory
