"""Draft head that the model's checkpoint carries (multi-token prediction), as a model of one layer (mlx).

The layer and the reading of its weights are mlx-lm's. Only the layer's input is built here.
"""

from __future__ import annotations

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
from tandem.loading.shard_modules import EmbeddingAsHead, at
from tandem.loading.stage import Apart, StageModel
from tandem.loading.weights import PartLoader, Weights, open_weights
from tandem.models.description import ModelDescription
from tandem.models.families.table import family_of
from tandem.models.mtp import JOIN, NORM, head_tensors

_LAYER, _NORM, _EMBEDDING, _OUTPUT = "model.layers.0", "model.norm", "model.embed_tokens", "lm_head"


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


class MTPHead(StageModel):
    """Draft head, as a stage whose forward pass also reads hidden states."""

    def join(self, tokens: mx.array, states: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Return the head's hidden states [B, L, H] after its norm, for tokens [B, L] that follow `states` [B, L, H]."""
        model = self._pipeline_model.model
        joined: Any = at(model, _EMBEDDING)
        joined._states = [states]
        hidden: mx.array = at(model, _NORM)(self.forward(tokens, caches))
        joined._states = []
        return hidden

    def head(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, H] of `join` to logits [B, L, V]."""
        logits: mx.array = at(self._pipeline_model.model, _OUTPUT)(h)
        return logits


def load_mtp_head(files: ModelFiles, description: ModelDescription, stage: StageModel, *, dequantize: bool) -> MTPHead:
    """Load the draft head of the model in `files` for the rank of its last `stage`. Raises ModelError.

    The embedding and the output projection are the stage's own; what it lacks, or has only a part of, is loaded whole.
    """
    config = {**read_config(files.path), "model_type": description.family, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    model: Any = build_model(config)
    patch_mlx_lm()
    model.set_dtype(stage.dtype)
    predicate = getattr(model, "cast_predicate", None)
    loader = PartLoader(
        quantization=description.quantization,
        dequantize=dequantize,
        dtype=stage.dtype,
        keep=(lambda name: not predicate(name)) if predicate else (lambda name: False),
        loaded=lambda nbytes: None,
    )
    tensors, root = read_tensors(files), f"model.layers.{description.num_layers}"
    modules: dict[str | int, nn.Module] = {}

    def load(path: str, module: nn.Module, weights: Weights, stored: str) -> nn.Module:
        own = {name[len(path) + 1 :]: weights.pop(name) for name in list(weights) if name.startswith(f"{path}.")}
        modules[stored] = loader.load(stored, module, own)
        return modules[stored]

    def whole(path: str) -> nn.Module:
        names = {name: name for name in tensors if name.startswith(f"{path}.")}
        return load(path, at(model, path), open_weights(files, model, description, names), path)

    shared = stage.modules if stage.shard is None else {}
    embedding = stage.modules[_EMBEDDING] if stage.is_first else shared.get(_EMBEDDING) or whole(_EMBEDDING)
    if not description.tied_head:
        model.lm_head = shared.get(_OUTPUT) or whole(_OUTPUT)
    head = head_tensors(description.family, description.num_layers, tensors)
    weights = open_weights(files, model, description, {name: f"{_LAYER}.{short}" for name, short in head.items()})
    joined = JoinedInput(description.hidden_size, model.args.rms_norm_eps)
    for name in JOIN:
        setattr(joined, name, load(f"{_LAYER}.{name}", joined[name], weights, f"{root}.{name}"))
    model.model.norm = load(f"{_LAYER}.{NORM}", model.model.norm, weights, f"{root}.{NORM}")
    model.model.layers = [load(_LAYER, model.model.layers[0], weights, root)]
    joined.embedding, model.model.embed_tokens = embedding, joined
    if description.tied_head:
        model.lm_head = EmbeddingAsHead(model, f"{_EMBEDDING}.embedding")
    pipeline_model = PipelineModel(model, range(1), family_of(description.family))
    nbytes = sum(array.nbytes for module in modules.values() for _, array in tree_flatten(module.parameters()))
    adapters = Adapters(pipeline_model.path, description, None, stage.dtype, 0)
    return MTPHead(pipeline_model, modules, replace(description, num_layers=1), stage.dtype, nbytes, adapters)
