"""Draft heads for multi-token prediction (MTP) that checkpoints carry behind or beside their layers. No mlx.

A head of these families is one more decoder layer, or two (Nemotron-H: attention, then experts). Its input joins a token's
embedding with the model's hidden state of the position before.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from tandem.checkpoints.safetensors import TensorInfo
from tandem.errors import BrokenModel, UnsupportedModel

JOIN = ("enorm", "hnorm", "eh_proj")
"""Modules that make the layer's input: norm of the embedding, norm of the hidden state, and the projection of both."""
NORM = "shared_head.norm"
"""Norm after the layer, before the model's own output projection."""
_QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": NORM}
_TWO_LAYERS = "nemotron_h"
_NAMES = {"qwen3_5": _QWEN, "qwen3_5_moe": _QWEN, "qwen3_next": _QWEN, _TWO_LAYERS: {"layers.1.final_layernorm": NORM}}
"""Types that keep the head beside the model's layers -> names there -> the other types' names."""
FAMILIES = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "glm4_moe", "glm4_moe_lite", *_NAMES)
"""Types whose heads are read."""
_SHARED = ("embed_tokens.", "shared_head.head.", "self_attn.rotary_emb.", "layers.")
"""Copies of the model's own embedding and output projection, computed tables, and layers after the first: not read."""


class Paths(NamedTuple):
    """Paths of the modules beside the layers of a model, in a head too."""

    norm: str
    embedding: str
    output: str

    @classmethod
    def of(cls, layers: str) -> Paths:
        """Return the paths in a model whose list of layers is at `layers`."""
        inner = layers.removesuffix("layers")
        if inner == "backbone.":
            return cls("backbone.norm_f", "backbone.embeddings", "lm_head")
        return cls(f"{inner}norm", f"{inner}embed_tokens", f"{inner.removesuffix('model.')}lm_head")


def input_norm(family: str) -> str:
    """Return the name of the norm before the first module of a head's layer."""
    return "norm" if family == _TWO_LAYERS else "input_layernorm"


def head_tensors(family: str, num_layers: int, names: Mapping[str, object]) -> dict[str, str]:
    """Return the stored names of the tensors of a checkpoint's draft head -> names below its layer; empty without one."""
    prefix = r"(?:\w+\.)*mtp\.(?:layers\.0\.)?" if family in _NAMES else rf"model\.layers\.{num_layers}\."
    found = {name: name[match.end() :] for name in names if (match := re.match(prefix, name))}
    parts, known = {name: short.rpartition(".") for name, short in found.items()}, _NAMES.get(family, {})
    found = {name: f"{known.get(module, module)}.{kind}" for name, (module, _, kind) in parts.items()}
    if family not in FAMILIES or not any(short.startswith("eh_proj.") for short in found.values()):
        return {}
    second = "layers.1." if family == _TWO_LAYERS else ""
    return {name: short for name, short in found.items() if not short.removeprefix(second).startswith(_SHARED)}


def stored_name(family: str, num_layers: int, part: str) -> str:
    """Return the name under which checkpoints keep a module of their head."""
    if family not in _NAMES:
        return f"model.layers.{num_layers}.{part}"
    return next((f"mtp.{name}" for name, theirs in _NAMES[family].items() if theirs == part), f"mtp.layers.0.{part}")


def require_head(
    name: str, family: str, num_layers: int, hidden_size: int, quantization: object, tensors: Mapping[str, TensorInfo]
) -> None:
    """Raise UnsupportedModel if the checkpoint `name` carries no draft head, BrokenModel if it lacks a part, is of a model of
    another hidden size, or is quantised where config.json has no settings for it (`quantization`)."""
    if family not in FAMILIES:
        raise UnsupportedModel(
            f"--speculative-method mtp: draft heads of {family} are not read, those of {', '.join(FAMILIES)} are; "
            "leave it out, or name a small model with --draft-model in place of it",
            param="speculative_method",
        )
    head = head_tensors(family, num_layers, tensors)
    shapes, packed = {short: tensors[stored].shape for stored, short in head.items()}, [s for s in head if s.endswith(".scales")]
    if not shapes:
        raise UnsupportedModel(
            f"--speculative-method mtp: {name} carries no draft head (no weight "
            f"{stored_name(family, num_layers, 'eh_proj')}.weight); leave it out, or name a small model with --draft-model",
            param="speculative_method",
        )
    without = "serve it with --speculative-method none"
    if packed and quantization is None:
        why = f"has {packed[0]}, so its draft head is quantised, but config.json has no 'quantization'; add it, or {without}"
        raise BrokenModel(f"{name}: {why}", param="speculative_method")
    for part in (*JOIN, NORM, input_norm(family)):
        shape = shapes.get(f"{part}.weight")
        where = f"{name}: weight {stored_name(family, num_layers, part)}.weight of its draft head"
        if shape is None:
            raise BrokenModel(f"{where} is missing; {without}", param="speculative_method")
        if shape[0] != hidden_size:
            raise BrokenModel(
                f"{where} has shape {tuple(shape)}, and the model's hidden size is {hidden_size}: it is another model's; "
                f"{without}",
                param="speculative_method",
            )
