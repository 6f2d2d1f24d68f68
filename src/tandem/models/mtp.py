"""Draft heads for multi-token prediction (MTP) that checkpoints carry behind their last layer. No mlx.

A head of these families is one more decoder layer. Its input joins a token's embedding with the model's hidden state of the
position before.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import BrokenModel, UnsupportedModel

FAMILIES = ("deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Types whose heads are read."""
JOIN = ("enorm", "hnorm", "eh_proj")
"""Modules that make the layer's input: norm of the embedding, norm of the hidden state, and the projection of both."""
NORM = "shared_head.norm"
"""Norm after the layer, before the model's own output projection."""
_SHARED = ("embed_tokens.", "shared_head.head.", "self_attn.rotary_emb.")
"""Copies of the model's own embedding and output projection, and computed tables: not read."""


def head_tensors(family: str, num_layers: int, names: Mapping[str, object]) -> dict[str, str]:
    """Return the stored names of the tensors of a checkpoint's draft head -> names below its layer; empty without one."""
    prefix = f"model.layers.{num_layers}."
    found = {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
    if family not in FAMILIES or not any(name.startswith("eh_proj.") for name in found.values()):
        return {}
    return {name: short for name, short in found.items() if not short.startswith(_SHARED)}


def require_head(name: str, family: str, num_layers: int, hidden_size: int, tensors: Mapping[str, TensorInfo]) -> None:
    """Raise UnsupportedModel if the checkpoint `name` carries no draft head, BrokenModel if it lacks a part or is of a model of
    another hidden size."""
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"--speculative-method mtp: draft heads of {family} are not read, those of {', '.join(FAMILIES)} are; "
            "leave it out, or name a small model with --draft-model",
            param="speculative_method",
        )
    shapes = {short: tensors[stored].shape for stored, short in head_tensors(family, num_layers, tensors).items()}
    if not shapes:
        raise UnsupportedModel(
            f"--speculative-method mtp: {name} carries no draft head (no weight model.layers.{num_layers}.eh_proj.weight); "
            "leave it out, or name a small model with --draft-model",
            param="speculative_method",
        )
    for part in (*JOIN, NORM, "input_layernorm"):
        shape = shapes.get(f"{part}.weight")
        where = f"{name}: weight model.layers.{num_layers}.{part}.weight of its draft head"
        without = "serve it with --speculative-method none"
        if shape is None:
            raise BrokenModel(f"{where} is missing; {without}", param="speculative_method")
        if shape[0] != hidden_size:
            raise BrokenModel(
                f"{where} has shape {tuple(shape)}, and the model's hidden size is {hidden_size}: it is another model's; "
                f"{without}",
                param="speculative_method",
            )
