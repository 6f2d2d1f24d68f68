"""One pipeline stage of a model: its layers, with the embedding on the first and the head on the last stage (mlx).

Chained stages compute bit for bit what mlx-lm's own model computes in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from functools import cached_property
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.cache import KVCache

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles, Progress, counter
from tandem.errors import BrokenModel, LayoutError, UnsupportedModel, UsageError
from tandem.loading.adapters import Adapters
from tandem.loading.build_model import build_model
from tandem.loading.fusion import fuse_projections
from tandem.loading.mlx_lm_models import FAILURES
from tandem.loading.pipeline_model import PipelineModel, unevaluated
from tandem.loading.prefix import members
from tandem.loading.quantized_kv import Cache, GroupedKVCache, Groups, groups_for, require_products
from tandem.loading.seams import patch_mlx_lm
from tandem.loading.shard_modules import (
    Around,
    Cutter,
    EmbeddingAsHead,
    SharedHead,
    TensorParallel,
    at,
    divide,
    head_cutter,
    is_whole,
    layer_cutter,
    put,
    rows_of,
    sum_outputs,
)
from tandem.loading.weights import PartLoader, TableLoader, one_line, open_weights, split_by_part
from tandem.models.description import ModelDescription, part_of_tensor
from tandem.models.families.table import family_of
from tandem.models.kv_types import KV_BITS
from tandem.models.shard import Shard

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}

_OTHER_TABLES = frozenset(("wpe", "embed_tokens_per_layer", "embedders"))
"""Names of embeddings that are not token embeddings: positions, per-layer inputs, n-grams."""


class Apart(list[list[Cache]]):
    """Caches of a batch whose sequences run one at a time: per row, the caches of a single sequence."""

    def __init__(self, rows: Sequence[list[Cache]], counts: Sequence[int]) -> None:
        """Store the rows' caches. `counts`: tokens of each row in the next call; the rest is padding."""
        super().__init__(rows)
        self.counts = counts


_STEP = KVCache.step
"""Positions by which mlx-lm's caches grow."""


class CacheBytes(NamedTuple):
    """Bytes of one sequence in a stage's caches."""

    position: int
    """Bytes of one position in all layers together; windowed layers count as full attention."""
    state: int
    """Bytes that do not depend on the length."""


class CacheMember(NamedTuple):
    """Cache without members of its own, in one of a stage's layers."""

    layer: int
    """Number of the layer within the stage; the first one if several share the cache. -1 for a cache of no layer: last tokens
    for the embedding, or a count of positions."""
    cache: Any
    """Empty cache of its class."""
    arrays: list[tuple[tuple[int, ...], mx.Dtype]]
    """Shape and type of each array after a call of one token, in `state`'s order."""

    @classmethod
    def all_of(cls, layer: int, empty: Sequence[Cache], used: Sequence[Cache]) -> list[CacheMember]:
        """Return the members of these caches of a layer: `empty`, and `used` in a call of one token."""
        return [
            cls(layer, one, [(part.shape, part.dtype) for _, part in tree_flatten(held.state) if isinstance(part, mx.array)])
            for one, held in zip(members(empty), members(used), strict=True)
        ]


class StageModel:
    """A contiguous range of a model's layers. Not thread-safe: one thread does all MLX work of a process."""

    def __init__(
        self,
        pipeline_model: PipelineModel,
        modules: Mapping[str | int, nn.Module],
        description: ModelDescription,
        dtype: mx.Dtype,
        nbytes: int,
        adapters: Adapters,
        shard: Shard | None = None,
    ) -> None:
        self.layers = pipeline_model.own
        """Numbers of the layers in this stage."""
        self.is_first = self.layers.start == 0
        self.is_last = self.layers.stop == description.num_layers
        self.hidden_size = pipeline_model.width
        """Elements per position in the payload between stages."""
        self.vocab_size = description.vocab_size
        self.dtype = dtype
        """Type of the activations in the payload between stages."""
        self.shard = shard
        """Part of each layer on this rank; None for all of it."""
        self.changing_rope = _changing_rope(pipeline_model.model)
        """Reason why keys depend on how a sequence is cut into calls; empty if they do not."""
        self.one_by_one = family_of(description.family).one_by_one or self.changing_rope
        """Reason why sequences of a batch run one at a time; empty if they run together."""
        self.nbytes = nbytes
        """Bytes of weights in memory."""
        self.adapters = adapters
        """LoRA adapters of the layers."""
        self.modules = modules
        """Loaded modules: layers by number, others by path."""
        self._pipeline_model = pipeline_model
        pipeline_model.adapters = adapters if adapters.most else None
        self._kv: tuple[Groups | None, ...] = ()

    def forward(self, x: mx.array, caches: Sequence[Cache] | Apart) -> mx.array:
        """Run this stage's layers; return hidden states [B, L, H], and captured ones behind them. Keys, values and states
        are appended to `caches`.

        `x` is tokens [B, L] (int32) on the first stage, elsewhere the previous stage's output.
        """
        if isinstance(caches, Apart):
            rows, parts = self.adapters.chosen, []
            for i, own in enumerate(caches):
                self.adapters.choose(rows[i : i + 1])
                part = self.forward(x[i : i + 1, : caches.counts[i]], own)
                parts.append(mx.pad(part, [(0, 0), (0, x.shape[1] - part.shape[1]), (0, 0)]))
            return mx.concatenate(parts)
        h = self._pipeline_model.run(x, caches)
        return h if h.dtype == self.dtype else h.astype(self.dtype)

    def capture(self, layers: Sequence[int]) -> None:
        """Hand the outputs of these layers of the model on to the last stage, behind its hidden states, for a draft head."""
        self._pipeline_model.capture(layers)
        self.hidden_size = self._pipeline_model.width

    def replace_layers(self, replaced: Callable[[int, nn.Module], nn.Module]) -> None:
        """Replace each own layer, given by its number, with what `replaced` returns for it."""
        for i in self.layers:
            self._pipeline_model.put_layer(i, replaced(i, self._pipeline_model.layers[i]))

    def take_features(self, chosen: Callable[[], tuple[mx.array, mx.array] | None]) -> None:
        """Let features stand in place of tokens' embeddings. First stage only.

        `chosen` returns those of the pass [B, L, H or more], and where they stand: bool [B, L]; None if there are none.
        """
        model, path = self._pipeline_model.model, _embedding(self.modules)
        put(model, path, _WithFeatures(at(model, path), chosen))

    def final(self, h: mx.array) -> mx.array:
        """Return hidden states [B, L, H] after the final norm, the head's input. Last stage only."""
        self._require_last()
        path = next(iter(self._output_projections), None)
        return self._pipeline_model.final(h, path or _embedding(self.modules), embedding=path is None)

    @cached_property
    def _output_projections(self) -> list[str]:
        return _heads(self._pipeline_model.model)

    def head(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, H] to logits [B, L, V] in the model's type. Last stage only.

        If the head is split over ranks, each computes its rows, and all ranks get the full logits.
        """
        self._require_last()
        return self._pipeline_model.head(h)

    def _require_last(self) -> None:
        if not self.is_last:
            raise LayoutError(f"stage with layers {self.layers} has no head, nor the norm before it")

    def arrays(self) -> list[mx.array]:
        """Return the arrays of all modules: weights, and tables that no file has."""
        return [array for module in self.modules.values() for _, array in tree_flatten(module) if isinstance(array, mx.array)]

    @cached_property
    def cache_bytes(self) -> CacheBytes:
        """Bytes of a sequence's caches, from the shapes of two traced calls; nothing is computed."""

        def held(tokens: int) -> int:
            arrays = (array for cache in self._traced(tokens) for _, array in tree_flatten(cache.state))
            return sum(array.nbytes for array in arrays if isinstance(array, mx.array))

        once, twice = held(_STEP), held(2 * _STEP)
        return CacheBytes((twice - once) // _STEP, 2 * once - twice)

    @cached_property
    def cache_members(self) -> list[CacheMember]:
        """Caches of the layers, members of a CacheList one by one, with their arrays after a call of one token."""
        found, start = list[CacheMember](), self.layers.start
        for number, (empty, traced) in enumerate(zip(self.make_caches(), self._traced(1), strict=True)):
            found += CacheMember.all_of(min(self.layers_of(number), default=start - 1) - start, [empty], [traced])
        return found

    def make_caches(self) -> list[Cache]:
        """Return fresh single-sequence caches of the own layers."""
        made = self._pipeline_model.make_caches()
        formats = self._kv or (None,) * len(made)
        return [GroupedKVCache(groups) if groups else one for one, groups in zip(made, formats, strict=True)]

    def quantize_kv(self, kv_dtype: str, latent: Collection[int] = ()) -> None:
        """Make later `make_caches` return quantised caches of type `kv_dtype` (8bit, 4bit). Layers in `latent`,
        windows, and heads whose width no group divides stay unquantised.

        Raise UnsupportedModel if the model's attention reads keys and values itself.
        """
        caches = self._traced(1)
        kept = [
            None if self.layers_of(at) & set(latent) else groups_for(cache, KV_BITS[kv_dtype]) for at, cache in enumerate(caches)
        ]
        self._kv = tuple(kept) if any(kept) else ()
        for groups in {one for one in kept if one}:
            require_products(groups)
        try:
            self._traced(1)
        except UnsupportedModel as error:
            raise UnsupportedModel(
                f"--kv-dtype {kv_dtype}: this model's attention computes with keys and values "
                "itself, and cannot read quantised ones; leave it out",
                param="kv_dtype",
            ) from error
        self.__dict__.pop("cache_bytes", None)
        self.__dict__.pop("cache_members", None)

    def layers_of(self, at: int) -> set[int]:
        """Return the numbers of the layers that use cache number `at`."""
        return self._pipeline_model.layers_of(at)

    @property
    def quantized_layers(self) -> list[int]:
        """Numbers of the layers whose keys and values are quantised."""
        return sorted(i for at, groups in enumerate(self._kv) if groups for i in self.layers_of(at))

    def trace(self) -> None:
        """Trace a call of one token without computing."""
        self._traced(1)

    @unevaluated()
    def _traced(self, tokens: int) -> list[Cache]:
        """Return fresh caches after a call with `tokens` tokens, with lazy arrays that are never evaluated."""
        caches = self.make_caches()
        x = mx.zeros((1, tokens), mx.int32)
        try:
            self._pipeline_model.run(x if self.is_first else mx.zeros((1, tokens, self.hidden_size), self.dtype), caches)
        except FAILURES as error:
            raise UnsupportedModel(
                f"its forward pass fails with {tokens} tokens: {type(error).__name__}: {one_line(error)}"
            ) from error
        return caches

    def caches_of_all_stages(self) -> list[Cache]:
        """Return fresh, unquantised caches for every layer of the model, equal on each rank."""
        return deepcopy(self._pipeline_model.made)


class _WithFeatures(Around):
    """Embedding in which the features that `chosen` returns stand at their positions."""

    def __init__(self, embedding: nn.Module, chosen: Callable[[], tuple[mx.array, mx.array] | None]) -> None:
        super().__init__(embedding)
        self._chosen = chosen

    def __call__(self, tokens: mx.array) -> mx.array:
        embedded: mx.array = self.module(tokens)
        if (chosen := self._chosen()) is None:
            return embedded
        features, taken = chosen
        return mx.where(taken[..., None], features[..., : embedded.shape[-1]].astype(embedded.dtype), embedded)


def load_stage(
    files: ModelFiles,
    description: ModelDescription,
    layers: range,
    *,
    dtype: str = "auto",
    dequantize: bool = False,
    progress: Progress | None = None,
    shard: Shard | None = None,
    tensor_parallel: TensorParallel | None = None,
    max_loras: int = 0,
    kv_dtype: str = "auto",
    fuse: bool = False,
) -> StageModel:
    """Load and evaluate `layers` of a model; with layer 0 also the embedding, with the last layer norm and head.

    `dtype` is the type of computation: float32, bfloat16, float16, or auto (as stored on a GPU, float32 on a CPU). With
    `dequantize` packed weights are expanded. `progress` is called with stored bytes done and in all. With `shard` (of
    `plan_shards`) only that part of each layer is loaded, and `tensor_parallel` all-reduces with the other ranks.
    `max_loras` is the most LoRA adapters to hold. `kv_dtype` (auto, 8bit, 4bit) is the type of keys and values in caches. With
    `fuse` projections of the same input become one product, which rounds differently from mlx-lm. Peak memory is the
    weights of this stage (or shard) plus about one tensor.

    Raise `BrokenModel` for weights that do not fit the config, `UsageError` for an unknown dtype. Raise `LayoutError`
    for an invalid range, or a shard that cannot be cut.
    """
    if shard is not None and shard.size == 1:
        shard = None
    _check(layers, description, shard, tensor_parallel)
    compute = _compute_dtype(dtype, description)
    model = _build(files, description)
    model.set_dtype(compute)  # also unloaded parts: models derive the type of some values from their embedding's
    pipeline_model = _pipeline_model(model, layers, description, shard, files.name)
    weights = split_by_part(open_weights(files, model, description), pipeline_model.path, model, description, str(files.path))
    owned = {part: weights.pop(part) for part in _owned(weights, layers, description)}
    weights.clear()  # weights of other stages are never read
    options: Any = {"quantization": description.quantization, "dtype": compute, "cast": getattr(model, "cast_predicate", None)}
    TableLoader(dequantize=False, **options).map_tables(files, pipeline_model, owned)
    total = sum(array.nbytes for part in owned.values() for array in part.values())
    loader = PartLoader(dequantize=dequantize, loaded=counter(progress, total), **options)
    modules = _load_parts(pipeline_model, owned, loader, _cutters(pipeline_model, owned, description, shard))
    nbytes = sum(a.nbytes for module in modules.values() for _, a in tree_flatten(module.parameters()))
    _share_head(model, modules, description, layers, shard, tensor_parallel)
    adapters = Adapters(pipeline_model.path, description, shard, compute, max_loras)
    for i in layers:
        if max_loras:
            adapters.note(i, pipeline_model.layers[i])
        if shard is not None:
            divide(pipeline_model.layers[i], shard, description)
    stage = StageModel(pipeline_model, modules, description, compute, nbytes, adapters, shard)
    if kv_dtype != "auto":
        stage.quantize_kv(kv_dtype, description.latent_layers)
    if fuse:
        own = {i: pipeline_model.layers[i] for i in layers}
        fuse_projections(own, stage.trace, lambda i, path: shard is not None and is_whole(own[i], path, description))
    if tensor_parallel is not None and shard is not None:
        stage.cache_bytes, stage.cache_members  # noqa: B018 - cached now, while a call of this rank alone still works
        for i in layers:
            sum_outputs(pipeline_model.layers[i], shard, description, tensor_parallel)
    return stage


def _check(layers: range, description: ModelDescription, shard: Shard | None, tensor_parallel: TensorParallel | None) -> None:
    count = description.num_layers
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
        raise LayoutError(f"layers {layers} are not a range of the model's {count}", param="layer_split")
    if shard is not None and tensor_parallel is None:
        raise LayoutError(f"rank {shard.rank} of {shard.size} needs the other ranks of its stage to compute with")


def _pipeline_model(
    model: nn.Module, layers: range, description: ModelDescription, shard: Shard | None, name: str
) -> PipelineModel:
    family = family_of(description.family)
    heads = (len(shard.queries), len(shard.kv_heads)) if shard else (description.num_heads, description.num_kv_heads)
    cause: Exception
    try:
        return PipelineModel(model, layers, family, grouped_scores=family.grouped_scores and heads[0] > heads[1])
    except UnsupportedModel as error:
        why, cause = error.message, error
    except FAILURES as error:
        why, cause = f"{type(error).__name__}: {one_line(error)}", error
    raise UnsupportedModel(f"{name}: {description.family} cannot run so: {why}") from cause


def _cutters(
    pipeline_model: PipelineModel, parts: Iterable[str | int], description: ModelDescription, shard: Shard | None
) -> dict[str | int, Cutter]:
    """Return the cutter of each part. Parts without one are replicated: the norm, and the first stage's embedding."""
    if shard is None:
        return {}
    cutters: dict[str | int, Cutter] = {}
    heads = _heads(pipeline_model.model)
    for part in parts:
        if isinstance(part, int):
            cutters[part] = layer_cutter(f"{pipeline_model.path}.{part}", pipeline_model.layers[part], shard, description)
        elif shard.vocab_sizes and (
            part in heads or (pipeline_model.own.start > 0 and _embeds_tokens(part, at(pipeline_model.model, part)))
        ):
            cutters[part] = head_cutter(part, shard, description)
    return cutters


def _role(path: str) -> str | int | None:
    """Return the role of a module outside the layers: `embed`, `head` or `rest`."""
    return part_of_tensor(f"{path}.weight", 0)


def _heads(model: nn.Module) -> list[str]:
    """Return the paths of output projections; other modules with a head's name, such as norms, are excluded."""
    named = [(path, module) for path, module in model.named_modules() if path and _role(path) == "head"]
    return [path for path, module in named if "weight" in module and module["weight"].ndim == 2]


def _embedding(modules: Mapping[str | int, nn.Module]) -> str:
    """Return the path of the embedding that serves as output projection in a tied model."""
    return next(path for path, module in modules.items() if isinstance(path, str) and _embeds_tokens(path, module))


def _embeds_tokens(path: str, module: nn.Module) -> bool:
    other = _OTHER_TABLES.intersection(path.split("."))
    return _role(path) == "embed" and hasattr(module, "as_linear") and not other


def _owned(parts: Iterable[str | int], layers: range, description: ModelDescription) -> list[str | int]:
    """Return the parts that the stage with `layers` holds, in the order of loading.

    The largest tensors come first, so that a tensor which is whole in memory before it is cut does not raise the peak.
    """
    first, last = layers.start == 0, layers.stop == description.num_layers
    paths = [part for part in parts if isinstance(part, str)]
    tied = description.tied_head or not any(_role(path) == "head" for path in paths)
    wanted = {"head": last and not tied, "rest": last, "embed": first or (last and tied)}
    owned: list[str | int] = [path for role in wanted for path in paths if _role(path) == role and wanted[role]]
    return [*owned, *layers]


def _changing_rope(model: nn.Module) -> str:
    """Return the reason why rows cannot run together if mlx-lm's rotary base depends on the length; else an empty text."""
    changes = any(type(module).__name__ == "DynamicNTKScalingRoPE" for module in model.modules())
    return "its rotary embedding changes with a sequence's length (dynamic rope scaling)" if changes else ""


def _share_head(
    model: nn.Module,
    modules: dict[str | int, nn.Module],
    description: ModelDescription,
    layers: range,
    shard: Shard | None,
    tensor_parallel: TensorParallel | None,
) -> None:
    """On the last stage, use the embedding as head if the files lack one, and split the head over the ranks."""
    if layers.stop != description.num_layers:
        return
    heads = _heads(model)
    head = modules.get(heads[0]) if heads else None
    if shard is not None and tensor_parallel is not None and shard.vocab_sizes:
        if head is not None:
            put(model, heads[0], SharedHead(head, shard, tensor_parallel))
        else:
            path = _embedding(modules)
            whole = modules[path]
            rows = rows_of(whole, shard.vocab) if layers.start == 0 else whole
            put(model, path, SharedHead(rows, shard, tensor_parallel, embedding=whole))
    if heads and head is None:
        put(model, heads[0], EmbeddingAsHead(model, _embedding(modules)))


def _compute_dtype(dtype: str, description: ModelDescription) -> mx.Dtype:
    """Return the type to cast weights to. On a GPU that is the embedding's, even for norms stored in another type."""
    if dtype == "auto":
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return mx.float32 if on_cpu else DTYPES[description.dtype]
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[dtype]


def _build(files: ModelFiles, description: ModelDescription) -> nn.Module:
    """Build the model with random weights, which stay lazy and are never computed."""
    try:
        model = build_model({**read_config(files.path), "model_type": description.family})
    except FAILURES as error:
        raise BrokenModel(f"{files.path}/config.json: does not describe a model: {one_line(error)}") from error
    patch_mlx_lm()
    return model


def _load_parts(
    pipeline_model: PipelineModel,
    owned: dict[str | int, dict[str, mx.array]],
    loader: PartLoader,
    cutters: dict[str | int, Cutter],
) -> dict[str | int, nn.Module]:
    modules: dict[str | int, nn.Module] = {}
    for part, weights in owned.items():
        if isinstance(part, int):
            modules[part] = loader.load(f"{pipeline_model.path}.{part}", pipeline_model.layers[part], weights, cutters.get(part))
            pipeline_model.put_layer(part, modules[part])
        else:
            modules[part] = loader.load(part, at(pipeline_model.model, part), weights, cutters.get(part))
            put(pipeline_model.model, part, modules[part])
        mx.clear_cache()  # buffers of the packed originals
    return modules
