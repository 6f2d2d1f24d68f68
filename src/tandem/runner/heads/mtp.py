"""Draft head that the model's checkpoint carries (multi-token prediction), as a model of one layer or two (mlx).

The layers and the reading of their weights are mlx-lm's. Only the layer's input is built here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, read_tensors
from tandem.loading.adapters import Adapters
from tandem.loading.build_model import build_model
from tandem.loading.pipeline_model import PipelineModel
from tandem.loading.quantized_kv import Cache
from tandem.loading.seams import patch_mlx_lm
from tandem.loading.shard_modules import EmbeddingAsHead, at, put
from tandem.loading.stage import Apart, StageModel
from tandem.loading.weights import PartLoader, Weights, open_weights
from tandem.models.description import ModelDescription
from tandem.models.families.table import family_of
from tandem.models.mtp import JOIN, NORM, Paths, head_tensors, input_norm
from tandem.runner.heads.separate import model_part

_ONE_LAYER = {"num_hidden_layers": 1, "first_k_dense_replace": 0, "full_attention_interval": 1, "mlp_only_layers": []}
"""Entries of config.json that make a model of the head's layers: with attention, and experts where the model has some."""
_CONVOLUTION = "linear_attn.conv1d.weight"


class JoinedInput(nn.Module):  # type: ignore[misc]
    """Input of the head's layer: embeddings of tokens, joined with the hidden states of the positions before them."""

    def __init__(self, width: int, eps: float) -> None:
        """Create the modules for hidden states of `width` elements."""
        super().__init__()
        self.enorm, self.hnorm = nn.RMSNorm(width, eps=eps), nn.RMSNorm(width, eps=eps)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.embedding: nn.Module = nn.Identity()
        self._states: list[mx.array] = []

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens [B, L] to the layer's input [B, L, H], with the states of `MTPHead.join`."""
        embedded = self.embedding(tokens)
        states = self._states[0] if self._states else mx.zeros_like(embedded)
        joined: mx.array = self.eh_proj(mx.concatenate([self.enorm(embedded), self.hnorm(states)], axis=-1))
        return joined

    def as_linear(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, H] to logits [B, L, V], for models whose embedding is the output projection too."""
        logits: mx.array = self.embedding.as_linear(h)
        return logits


class MTPHead(StageModel):
    """Draft head, as a stage whose forward pass also reads hidden states."""

    def __init__(self, target: StageModel, pipeline_model: PipelineModel, *rest: Any) -> None:
        """Store the head's modules: see StageModel. `target`: last stage of the model."""
        super().__init__(pipeline_model, *rest)
        self._target = target
        self._model = pipeline_model.model
        self._paths = Paths.of(pipeline_model.path)
        self.width = pipeline_model.width
        """Elements of the model's states at a position."""

    def states(self, hidden: mx.array) -> mx.array:
        """Return the head's input for the model's hidden states [B, L, H]: those after its last norm."""
        return self._target.final(hidden)

    def tokens(self, ids: mx.array) -> mx.array:
        """Return the ids, which are the model's."""
        return ids

    def join(self, tokens: mx.array, states: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Return the head's hidden states [B, L, H] after its norm, for tokens [B, L] that follow `states` [B, L, H]."""
        joined: Any = at(self._model, self._paths.embedding)
        joined._states = [states]
        hidden: mx.array = at(self._model, self._paths.norm)(self.forward(tokens, caches))
        joined._states = []
        return hidden

    def head(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, H] of `join` to logits [B, L, V]."""
        logits: mx.array = at(self._model, self._paths.output)(h)
        return logits


def stacked(weights: Weights) -> Weights:
    """Return weights with experts as one array where `sanitize` leaves them one by one, as Qwen3.5's heads have them."""
    experts: dict[str, dict[int, mx.array]] = {}
    for name in list(weights):
        if match := re.fullmatch(r"(.*)\.experts\.(\d+)\.(.*)", name):
            experts.setdefault(f"{match[1]}.switch_mlp.{match[3]}", {})[int(match[2])] = weights.pop(name)
    return weights | {name: mx.stack([parts[i] for i in sorted(parts)]) for name, parts in experts.items()}


def load_mtp_head(files: ModelFiles, description: ModelDescription, stage: StageModel, *, dequantize: bool) -> MTPHead:
    """Load the draft head of the model in `files` for the rank of its last `stage`. Raises ModelError.

    The embedding and the output projection are the stage's own; what it lacks, or has only a part of, is loaded whole.
    """
    tensors = read_tensors(files)
    head = head_tensors(description.family, description.num_layers, tensors)
    stored, first = {short: name for name, short in head.items()}, f"{input_norm(description.family)}.weight"
    count = 1 + (f"layers.1.{first}" in stored)
    kinds = ["*" if f"{layer}mixer.q_proj.weight" in stored else "E" for layer in ("", "layers.1.")]
    entries = {**_ONE_LAYER, "hybrid_override_pattern": kinds[:count]}  # Nemotron-H
    config = {**read_config(files.path), "model_type": description.family, **entries}
    if isinstance(config.get("text_config"), dict):
        config["text_config"] = {**config["text_config"], **entries}
    model: Any = build_model(config)
    patch_mlx_lm()
    model.set_dtype(stage.dtype)
    family = family_of(description.family)
    paths, inner = Paths.of(family.layers), family.layers.removesuffix("layers")
    predicate = getattr(model, "cast_predicate", None)
    loader = PartLoader(quantization=description.quantization, dequantize=dequantize, dtype=stage.dtype, cast=predicate)
    modules: dict[str | int, nn.Module] = {}

    def load(path: str, module: nn.Module, weights: Weights, stored: str) -> nn.Module:
        own = {name[len(path) + 1 :]: weights.pop(name) for name in list(weights) if name.startswith(f"{path}.")}
        modules[stored] = loader.load(stored, module, own)
        return modules[stored]

    whole: list[nn.Module] = []
    embedding = model_part("embed", files, stage, whole, dequantize=dequantize)
    if not description.tied_head:
        put(model, paths.output, model_part("head", files, stage, whole, dequantize=dequantize))
    modules |= {str(i): module for i, module in enumerate(whole)}
    # `sanitize` reads the norms beside the layer as norms of a layer, and tells by a convolution how they are stored.
    norms = {f"{name}.weight": f"{name}.input_layernorm.weight" for name in ("enorm", "hnorm", NORM)}
    places = {name: norms.get(short, short) for name, short in head.items()}
    places |= {name: _CONVOLUTION for name in tensors if name.endswith(_CONVOLUTION)}
    names = {name: inner + ("" if place.startswith("layers.") else "layers.0.") + place for name, place in places.items()}
    weights = stacked(open_weights(files, model, description, names))
    weights.pop(f"{family.layers}.0.{_CONVOLUTION}", None)
    joined = JoinedInput(description.hidden_size, at(model, paths.norm).eps)

    def part(name: str, module: nn.Module) -> nn.Module:
        path = norms.get(f"{name}.weight", f"{name}.weight").removesuffix(".weight")
        return load(f"{family.layers}.0.{path}", module, weights, stored[f"{name}.weight"].removesuffix(".weight"))

    for name in JOIN:
        setattr(joined, name, part(name, joined[name]))
    put(model, paths.norm, part(NORM, at(model, paths.norm)))
    for i in range(count):
        path, name = f"{family.layers}.{i}", stored[f"layers.{i}.{first}" if i else first]
        put(model, path, load(path, at(model, path), weights, name.removesuffix(f".{first}")))
    joined.embedding = embedding
    put(model, paths.embedding, joined)
    if description.tied_head:
        put(model, paths.output, EmbeddingAsHead(model, paths.embedding))
    if hasattr(holder := at(model, inner.removesuffix(".")), "ssm_idx"):
        holder.ssm_idx = slice(0)  # no layer with a state, so no cache that gives its mask
    pipeline_model = PipelineModel(model, range(count), family)
    nbytes = sum(array.nbytes for module in modules.values() for _, array in tree_flatten(module.parameters()))
    adapters = Adapters(pipeline_model.path, description, None, stage.dtype, 0)
    return MTPHead(stage, pipeline_model, modules, replace(description, num_layers=count), stage.dtype, nbytes, adapters)
