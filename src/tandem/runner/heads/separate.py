"""Draft heads with a directory of their own: EAGLE-3, DFlash and Gemma 4's assistant (mlx). Their layers are mlx-vlm's."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_lm.models.rope_utils import initialize_rope

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, read_tensors, weight_files
from tandem.errors import BrokenModel
from tandem.loading.build_model import build_model
from tandem.loading.mlx_lm_models import FAILURES
from tandem.loading.quantized_kv import Cache
from tandem.loading.shard_modules import at, put
from tandem.loading.stage import Apart, CacheBytes, StageModel
from tandem.loading.text_tower import import_lazily
from tandem.loading.weights import PartLoader, Weights, load_file, one_line, open_weights
from tandem.models.description import describe, part_of_tensor
from tandem.models.draft_heads import DraftHead, part_name, read_head
from tandem.models.families.table import family_of
from tandem.models.mtp import Paths


class Eagle3Head:
    """Draft head that reads captured states of the model's layers first, and then its own output. Not thread-safe."""

    one_by_one = ""
    """Empty: sequences of a batch run together."""

    def __init__(self, model: Any, own: Sequence[mx.array], head: DraftHead, stage: StageModel) -> None:
        """Store mlx-vlm's `model` of `head` and its `own` arrays. `stage`: the model's last one."""
        self._model, self._own, self._target, description = model, own, stage, head.description
        self.width = int(description.hidden_size * (1 if head.kind == "mtp" else len(head.layers)))
        """Elements of the model's states at a position."""
        self.vocab_size = stage.vocab_size
        """Tokens of the model's vocabulary, which it reads."""
        self.nbytes = sum(array.nbytes for array in own)
        """Bytes of weights in memory, without what it shares."""
        self.cache_bytes = CacheBytes(int(description.num_layers * description.token_elements * stage.dtype.size), 0)
        """Bytes of one sequence in its caches."""

    def arrays(self) -> list[mx.array]:
        """Return its own arrays."""
        return list(self._own)

    def make_caches(self) -> list[Cache]:
        """Return fresh single-sequence caches of its layers."""
        return [KVCache() for _ in self._model.layers]

    def states(self, hidden: mx.array) -> mx.array:
        """Return the captured states [B, L, W] behind the last stage's hidden states."""
        return hidden[..., -self.width :]

    def join(self, tokens: mx.array, states: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Return its hidden states [B, L, W] for tokens [B, L] that follow captured states, or hidden states of its own."""
        first: Any = caches[0]
        self._model._cache, self._model._next_position = list(caches), mx.array(first.offset)  # a copy: it changes in place
        hidden: mx.array = self._model._forward_tokens(tokens, states, tokens.dtype)
        self._model._cache = []
        return hidden

    def head(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, W] of `join` to logits [B, L, its own vocabulary]."""
        logits: mx.array = self._model._logits(h)
        return logits

    def tokens(self, ids: mx.array) -> mx.array:
        """Map ids of its vocabulary to the model's."""
        found: mx.array = self._model._draft_to_target(ids, mx.int32)
        return found


class DFlashHead(Eagle3Head):
    """Draft head that guesses a block of tokens from captured states alone, for one sequence at a time. Not thread-safe."""

    def join(self, tokens: mx.array, states: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Add states [B, L, W] to the caches; return hidden states [B, 1, H] of a block of the last of `tokens` alone."""
        hidden: mx.array = self._model._hidden(tokens[:, -1:], states, caches)
        return hidden

    def block(self, token: int, states: mx.array, caches: Sequence[Cache], count: int) -> mx.array:
        """Add states [1, L, W] to the caches; return int32 [1, count]: the likeliest tokens after `token`, which follows them."""
        found: mx.array = self._model.draft_block(token, states, caches, count + 1, partial(mx.argmax, axis=-1))
        return found.astype(mx.int32)


class AssistantHead(DFlashHead):
    """Draft head without caches: it reads the model's keys and values, for one sequence at a time. Not thread-safe."""

    def make_caches(self) -> list[Cache]:
        """Return no caches."""
        return []

    def states(self, hidden: mx.array) -> mx.array:
        """Return the model's hidden states [B, 1, H] at the last position, after its last norm."""
        return self._target.final(hidden[:, -1:])

    def join(self, tokens: mx.array, states: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Return the states: nothing of a prompt is kept."""
        return states

    def block(self, token: int, states: mx.array, caches: Any, count: int) -> mx.array:
        """Return int32 [1, count]: the likeliest tokens after `token`. `caches`: keys and values by kind of the layer."""
        length = caches["full_attention"][0].shape[2]
        self._model.set_shared_kv(caches, length, length - 1)
        found = super().block(token, states, (), count)
        self._model.set_shared_kv({}, 0)
        return found

    def try_out(self) -> None:
        """Guess one token from zeros. Raise one of FAILURES if shapes or the order of tokens do not fit the model."""
        stage, masked, kv = self._target, self._model.masked_embedding, dict[str, list[mx.array]]()
        for _, cache, arrays in stage.cache_members:
            kind = "sliding_attention" if type(cache) is RotatingKVCache else "full_attention"
            packed = len(arrays) > 2  # codes, scales and biases of keys, then of values
            sides = [arrays[i][0] for i in ((1, 4) if packed else (0, 1))]
            kv[kind] = [mx.zeros((1, side[1], 2, side[3] * (cache.group_size if packed else 1)), stage.dtype) for side in sides]
        if masked is not None and not mx.array_equal(mx.sort(masked.token_ordering), mx.arange(self.vocab_size)).item():
            raise ValueError("its token_ordering does not name each token once")
        mx.eval(self.block(0, mx.zeros((1, 1, self.width), stage.dtype), kv, 1))


def load_head(kind: str, files: ModelFiles, target: ModelFiles, stage: StageModel, *, dequantize: bool) -> Eagle3Head:
    """Load the head of this kind in `files` for the rank of the last `stage` of the model in `target`. Raises ModelError.

    The model's embedding, for a DFlash head its output projection too, is loaded whole where the head has none, and the stage
    lacks it or has a part; with `dequantize` it is expanded.
    """
    model = describe(target)
    head = read_head(kind, files, model)
    built = _build(files, head)
    stored = {name: array for path in weight_files(files.path) for name, array in load_file(path).items()}
    if kind == "eagle3":
        stored = {part_name(name): array for name, array in stored.items()}
    kept, weights = stored.pop("t2d", mx.ones(model.vocab_size)), built.sanitize(stored)
    shares, offsets = not head.description.embed_bytes, weights.pop("d2t", mx.array(0))
    if kind == "eagle3" and shares:
        built.embed_tokens = None
    loaded = _load_parts(files, built, weights, stage)
    if kind == "eagle3" and built.d2t is not None:
        built.d2t, ids = offsets, mx.arange(built.draft_vocab_size) + offsets
        if not mx.all((ids >= 0) & (ids < model.vocab_size) & (kept[mx.clip(ids, 0, model.vocab_size - 1)] > 0)).item():
            raise BrokenModel(
                f"--draft-model {files.name}: d2t does not map its tokens to those of the model in t2d", param="draft_model"
            )
    if shares:
        built.embed_tokens = model_part("embed", target, stage, loaded, dequantize=dequantize)
    own = _arrays(loaded)
    if kind == "dflash":
        tied = model.tied_head
        built.lm_head = built.embed_tokens.as_linear if tied else model_part("head", target, stage, loaded, dequantize=dequantize)
        built._project_context_kv(mx.zeros((1, 1, model.hidden_size), stage.dtype))  # joins their weights, once
        mx.eval(built._fused_context_kv_weight)
        own = [*_arrays(loaded), built._fused_context_kv_weight]
    if kind == "mtp":
        built.bind(SimpleNamespace(embed_tokens=built.embed_tokens, embed_scale=model.hidden_size**0.5))
    made = _KINDS[kind][0](built, own, head, stage)
    if isinstance(made, AssistantHead):
        try:
            made.try_out()
        except FAILURES as error:
            why = f"--draft-model {files.name}: does not fit the model's keys and values ({one_line(error)}); name another head"
            raise BrokenModel(why, param="draft_model") from error
    return made


def _load_parts(files: ModelFiles, built: Any, weights: Weights, stage: StageModel) -> list[nn.Module]:
    """Load the parts of mlx-vlm's model from the `weights` in `files`, in the stage's type. Return them."""
    names, loaded = [name for name, part in built.children().items() if isinstance(part, nn.Module)], []
    for name in (*names, *(f"layers.{i}" for i in range(len(getattr(built, "layers", ()))))):
        own = {key[len(name) + 1 :]: weights.pop(key) for key in list(weights) if key.startswith(f"{name}.")}
        loaded.append(PartLoader(dtype=stage.dtype, quantization=None, dequantize=False).load(name, at(built, name), own))
        put(built, name, loaded[-1])
    if weights:
        raise BrokenModel(f"--draft-model {files.name}: weight {min(weights)} does not fit config.json", param="draft_model")
    return loaded


def model_part(part: str, target: ModelFiles, stage: StageModel, loaded: list[nn.Module], *, dequantize: bool) -> nn.Module:
    """Return the embedding (`embed`) or output projection (`head`) of the model in `target`. What the stage lacks, or has only
    a part of, is loaded whole, and added to `loaded`."""
    model = describe(target)
    paths = Paths.of(family_of(model.family).layers)
    place = paths.embedding if part == "embed" else paths.output
    shared = stage.modules.get(place) if (part == "embed" and stage.is_first) or stage.shard is None else None
    if shared is not None:
        return shared
    whole: Any = build_model({**read_config(target.path), "model_type": model.family})
    stored_names = {one: one for one in read_tensors(target) if part_of_tensor(one, model.num_layers) == part}
    found = {one[len(place) + 1 :]: array for one, array in open_weights(target, whole, model, stored_names).items()}
    loader = PartLoader(dtype=stage.dtype, quantization=model.quantization, dequantize=dequantize)
    loaded.append(loader.load(place, at(whole, place), found))
    return loaded[-1]


def _arrays(loaded: Sequence[nn.Module]) -> list[mx.array]:
    """Return the arrays of these modules."""
    return [array for part in loaded for _, array in tree_flatten(part.parameters())]


def _build(files: ModelFiles, head: DraftHead) -> Any:
    """Build mlx-vlm's model of a head with random weights, which stay lazy."""
    import_lazily()
    _, module, name = _KINDS[head.kind]
    try:
        theirs = importlib.import_module(f"mlx_vlm.speculative.drafters.{module}")
        built = getattr(theirs, f"{name}DraftModel")(getattr(theirs, f"{name}Config").from_dict(head.config))
    except FAILURES as error:
        raise BrokenModel(f"{files.path}/config.json: describes no head that mlx-vlm builds: {one_line(error)}") from error
    text: Any = head.config["transformer_layer_config"] if head.kind == "eagle3" else {}
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    for layer in built.layers if rope else ():  # theirs reads the base alone
        own = built.config.transformer_layer_config
        layer.self_attn.rope = initialize_rope(own.head_dim, own.rope_theta, False, rope, own.max_position_embeddings)
    return built


_KINDS = {
    "eagle3": (Eagle3Head, "eagle3.eagle3", "Eagle3"),
    "dflash": (DFlashHead, "qwen3_dflash.dflash", "DFlash"),
    "mtp": (AssistantHead, "gemma4_assistant.gemma4_assistant", "Gemma4Assistant"),
}
"""Kind of head -> its class, mlx-vlm's module, and the beginning of its classes' names there."""
