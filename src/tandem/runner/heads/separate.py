"""Draft heads with a directory of their own: EAGLE-3, DFlash and Gemma 4's assistant (mlx). Their layers are mlx-vlm's."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
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
from tandem.models.draft_heads import READERS, DraftHead, part_name
from tandem.models.families.table import family_of
from tandem.models.mtp import Paths
from tandem.models.sources import require_mlx_vlm


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

    @cached_property
    def sources(self) -> dict[int, str]:
        """Numbers of the model's last cache without a window, and of its last with one, and kinds of their layers."""
        found = {type(cache) is RotatingKVCache: at for at, cache in enumerate(self._target.make_caches())}
        return {found[False]: "full_attention", found[True]: "sliding_attention"}

    def make_caches(self) -> list[Cache]:
        """Return no caches."""
        return []

    def states(self, hidden: mx.array) -> mx.array:
        """Return the model's hidden states [B, L, H] after its last norm."""
        return self._target.final(hidden)

    def join(self, tokens: mx.array, states: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Return the states: nothing of a prompt is kept."""
        return states

    def block(self, token: int, states: mx.array, caches: Sequence[Any], count: int) -> mx.array:
        """Return int32 [1, count]: the likeliest tokens after `token`. `caches`: keys and values of the layers in `sources`."""
        length = caches[0][0].shape[2]
        self._model.set_shared_kv(dict(zip(self.sources.values(), caches, strict=True)), length, length - 1)
        pick = partial(mx.argmax, axis=-1)
        found: mx.array = self._model.draft_block(token, states[:, -1:], None, count + 1, pick, greedy=True)
        self._model.set_shared_kv({}, 0)
        return found.astype(mx.int32)


def load_eagle3(files: ModelFiles, target: ModelFiles, stage: StageModel, *, dequantize: bool) -> Eagle3Head:
    """Load the head in `files` for the rank of the last `stage` of the model in `target`. Raises ModelError.

    The model's embedding is loaded whole where the head has none, and the stage lacks it; with `dequantize` it is expanded.
    """
    model = describe(target)
    head = READERS["eagle3"](files, model)
    built = _build(files, "EAGLE-3", "eagle3.eagle3", lambda theirs: _eagle3(theirs, head))
    stored = {part_name(name): array for name, array in _stored(files).items()}
    kept = stored.pop("t2d", mx.ones(model.vocab_size))
    weights: Weights = built.sanitize(stored)
    shares = not head.description.embed_bytes
    built.embed_tokens = None if shares else built.embed_tokens
    ids, offsets = mx.arange(built.draft_vocab_size), weights.pop("d2t", mx.array(0))
    loaded = _load_parts(files, built, weights, stage)
    if built.d2t is not None:
        built.d2t, ids = offsets, ids + offsets
        if not mx.all((ids >= 0) & (ids < model.vocab_size) & (kept[mx.clip(ids, 0, model.vocab_size - 1)] > 0)).item():
            raise BrokenModel(
                f"--draft-model {files.name}: d2t does not map its tokens to those of the model in t2d", param="draft_model"
            )
    if shares:
        built.embed_tokens = model_part("embed", target, stage, loaded, dequantize=dequantize)
    return Eagle3Head(built, _arrays(loaded), head, stage)


def load_dflash(files: ModelFiles, target: ModelFiles, stage: StageModel, *, dequantize: bool) -> DFlashHead:
    """Load the head in `files` for the rank of the last `stage` of the model in `target`. Raises ModelError.

    The model's embedding and output projection are loaded whole where the stage lacks them, or has a part; with `dequantize`
    they are expanded.
    """
    model = describe(target)
    head = READERS["dflash"](files, model)
    built = _build(
        files, "DFlash", "qwen3_dflash.dflash", lambda theirs: theirs.DFlashDraftModel(theirs.DFlashConfig.from_dict(head.config))
    )
    loaded = _load_parts(files, built, built.sanitize(_stored(files)), stage)
    built.embed_tokens = model_part("embed", target, stage, loaded, dequantize=dequantize)
    built.lm_head = built.embed_tokens.as_linear
    if not model.tied_head:
        built.lm_head = model_part("head", target, stage, loaded, dequantize=dequantize)
    built._project_context_kv(mx.zeros((1, 1, model.hidden_size), stage.dtype))  # joins their weights, once
    mx.eval(built._fused_context_kv_weight)
    return DFlashHead(built, [*_arrays(loaded), built._fused_context_kv_weight], head, stage)


def load_assistant(files: ModelFiles, target: ModelFiles, stage: StageModel, *, dequantize: bool) -> AssistantHead:
    """Load the assistant in `files` for the rank of the last `stage` of the model in `target`. Raises ModelError.

    The model's embedding is loaded whole where the stage lacks it; with `dequantize` it is expanded.
    """
    model = describe(target)
    head = READERS["mtp"](files, model)
    built = _build(
        files, "assistant", "gemma4_assistant.gemma4_assistant",
        lambda theirs: theirs.Gemma4AssistantDraftModel(theirs.Gemma4AssistantConfig.from_dict(head.config)),
    )  # fmt: skip
    loaded = _load_parts(files, built, built.sanitize(_stored(files)), stage)
    embedding = model_part("embed", target, stage, loaded, dequantize=dequantize)
    built.bind(SimpleNamespace(embed_tokens=embedding, embed_scale=model.hidden_size**0.5))
    return AssistantHead(built, _arrays(loaded), head, stage)


LOADERS = {"eagle3": load_eagle3, "dflash": load_dflash, "mtp": load_assistant}
"""Kind of head -> function that loads it."""


def _stored(files: ModelFiles) -> Weights:
    """Return all weights in the files of a head."""
    return {name: array for path in weight_files(files.path) for name, array in load_file(path).items()}


def _load_parts(files: ModelFiles, built: Any, weights: Weights, stage: StageModel) -> list[nn.Module]:
    """Load the parts of mlx-vlm's model from the `weights` in `files`, in the stage's type. Return them."""
    names, loaded = [name for name, part in built.children().items() if isinstance(part, nn.Module)], []
    for name in (*names, *(f"layers.{i}" for i in range(len(getattr(built, "layers", ()))))):
        own = {key[len(name) + 1 :]: weights.pop(key) for key in list(weights) if key.startswith(f"{name}.")}
        loaded.append(_loader(stage, quantization=None, dequantize=False).load(name, at(built, name), own))
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
    loaded.append(_loader(stage, quantization=model.quantization, dequantize=dequantize).load(place, at(whole, place), found))
    return loaded[-1]


def _arrays(loaded: Sequence[nn.Module]) -> list[mx.array]:
    """Return the arrays of these modules."""
    return [array for part in loaded for _, array in tree_flatten(part.parameters())]


def _loader(stage: StageModel, **options: Any) -> PartLoader:
    return PartLoader(dtype=stage.dtype, **options)


def _build(files: ModelFiles, kind: str, module: str, make: Callable[[Any], Any]) -> Any:
    """Build mlx-vlm's model of a head by `make`, which gets mlx-vlm's module, with random weights, which stay lazy."""
    require_mlx_vlm(f"{kind} heads are computed")
    import_lazily()
    try:
        return make(importlib.import_module(f"mlx_vlm.speculative.drafters.{module}"))
    except FAILURES as error:
        raise BrokenModel(f"{files.path}/config.json: describes no {kind} head that mlx-vlm builds: {one_line(error)}") from error


def _eagle3(theirs: Any, head: DraftHead) -> Any:
    """Build mlx-vlm's model of an EAGLE-3 head."""
    config = theirs.Eagle3Config.from_dict(head.config)
    built, text = theirs.Eagle3DraftModel(config), head.config["transformer_layer_config"]
    rope = text.get("rope_scaling") or text.get("rope_parameters")
    own = config.transformer_layer_config
    for layer in built.layers if rope else ():  # theirs reads the base alone
        layer.self_attn.rope = initialize_rope(own.head_dim, own.rope_theta, False, rope, own.max_position_embeddings)
    return built
