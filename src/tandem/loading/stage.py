"""One pipeline stage of a model: its layers, and the embedding or the head where it is first or last (mlx).

Chained stages compute what mlx-lm's own model computes in one process, bit for bit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache, RotatingKVCache

from tandem.checkpoints.config import read_config
from tandem.checkpoints.files import ModelFiles
from tandem.errors import BrokenModel, LayoutError, UsageError
from tandem.loading.adapters import AdapterLoader
from tandem.loading.families.special import PLAIN, SPECIAL, Special
from tandem.loading.shard_modules import Cutter, TensorParallel, divide_layer, head_cutter, layer_cutter, rows_of
from tandem.loading.weights import PartLoader, one_line, open_weights, split_by_part
from tandem.models.adapter_files import Adapter
from tandem.models.description import ModelDescription
from tandem.models.families.table import FAMILIES, Family
from tandem.models.shard import Shard

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """Loaded modules of one stage."""

    layers: tuple[nn.Module, ...]
    embed: nn.Module | None
    """On the first stage."""
    norm: nn.Module | None
    head: nn.Module | None
    """Output projection where it is not tied."""
    tied: nn.Module | None
    """Embedding as output projection: the whole one, or the rank's rows; where there is `embed`, in its memory."""


class StageModel:
    """A contiguous range of a model's layers. Not thread-safe: one thread owns all of a process's MLX work."""

    def __init__(
        self,
        parts: _Parts,
        layers: range,
        description: ModelDescription,
        args: Any,
        dtype: mx.Dtype,
        kinds: Sequence[Any],
        shard: Shard | None = None,
        tensor_parallel: TensorParallel | None = None,
    ) -> None:
        self.layers = layers
        """Numbers of the layers that this stage holds."""
        self.is_first = layers.start == 0
        self.is_last = layers.stop == description.num_layers
        self.hidden_size = description.hidden_size
        self.vocab_size = description.vocab_size
        self.dtype = dtype
        """Type of the activations that stages hand on."""
        self.shard = shard
        """This rank's part of each layer; None for all of it."""
        self.kv_heads = len(shard.kv_heads) if shard else description.num_kv_heads
        """Key and value heads that this rank holds."""
        self.kv_width = self.kv_heads * description.head_dim
        """Elements of one position's keys in one layer, on this rank."""
        self._tensor_parallel = tensor_parallel
        self._parts = parts
        self._args = args
        self._special: Special = SPECIAL.get(description.family, PLAIN)
        self._grouped = description.num_heads > description.num_kv_heads
        self._windows: tuple[int | None, ...] = tuple(kinds)
        modules = [*parts.layers, parts.embed or parts.tied, parts.norm, parts.head]
        self.nbytes = sum(a.nbytes for m in modules if m is not None for _, a in tree_flatten(m.parameters()))
        """Bytes of weights in memory."""

    def embed(self, tokens: mx.array) -> mx.array:
        """Tokens [B, L] (int32) to hidden states [B, L, H]. First stage only."""
        if not self.is_first or self._parts.embed is None:
            raise LayoutError(f"stage with layers {self.layers} has no embedding")
        return self._special.embed(self._parts.embed(tokens), self._args)

    def forward(self, h: mx.array, caches: Sequence[Any]) -> mx.array:
        """Hidden states [B, L, H] through this stage's layers; `caches` (one per layer) take up keys and values.

        Masks are made once for each kind of cache, from the first cache of that kind: all of a kind stand at the
        same position.
        """
        masks: dict[int | None, Any] = {}
        for layer, cache, window in zip(self._parts.layers, caches, self._windows, strict=True):
            if window not in masks:
                mask = create_attention_mask(h, cache, window_size=window, return_array=self._special.array_mask)
                if self._special.array_mask and self._grouped and mask is not None and mask.ndim == 4:
                    mask = mask[:, :, None]  # rows' own masks, for scores [rows, kv heads, groups, N, positions]
                masks[window] = mask
            h = layer(h, masks[window], cache)
        return h

    def final(self, h: mx.array) -> mx.array:
        """Hidden states [B, L, H] after the final norm, as the head gets them. Last stage only."""
        if not self.is_last or self._parts.norm is None:
            raise LayoutError(f"stage with layers {self.layers} has no head, nor the norm before it")
        return self._parts.norm(h)

    def head(self, h: mx.array) -> mx.array:
        """Hidden states [B, L, H] to logits [B, L, V] in the model's type. Last stage only.

        Where ranks share the head, each computes its rows and all get the whole.
        """
        h = self.final(h)
        if self._parts.head is not None:
            logits = self._parts.head(h)
        else:
            assert self._parts.tied is not None
            logits = self._parts.tied.as_linear(h)
        if self._tensor_parallel is not None and self.shard is not None and self.shard.vocab_sizes:
            logits = self._tensor_parallel.gather_last(logits, self.shard.vocab_sizes)
        return self._special.logits(logits, self._args)

    def make_caches(self) -> list[Any]:
        """Fresh single-sequence caches of mlx-lm, one per own layer: KVCache, or RotatingKVCache for a window."""
        return [KVCache() if window is None else RotatingKVCache(max_size=window) for window in self._windows]


def load_stage(
    files: ModelFiles,
    description: ModelDescription,
    layers: range,
    *,
    dtype: str = "auto",
    dequantize: bool = False,
    progress: Callable[[int, int], None] | None = None,
    shard: Shard | None = None,
    tensor_parallel: TensorParallel | None = None,
    adapter: Adapter | None = None,
) -> StageModel:
    """Load layers `layers` of a model, evaluated; with layer 0 the embedding, with the last layer norm and head.

    `dtype` is the type of computation: float32, bfloat16, float16, or auto (as stored on a GPU, float32 on a CPU).
    With `dequantize` packed weights are expanded. `progress` gets stored bytes done and in all. With `shard` (of
    `plan_shards`) only that part of each layer is kept, and computes together with the other ranks' parts through
    `tensor_parallel`. What `adapter` adds to these layers is loaded too. Peak memory is this stage's (or shard's)
    weights plus about one tensor. Raises `BrokenModel` for weights that do not fit, `LayoutError` for a range that is
    not the model's or a shard that cannot be cut, `UsageError` for an unknown dtype.
    """
    if shard is not None and shard.size == 1:
        shard = None
    _check(layers, description, shard, tensor_parallel)
    compute = _compute_dtype(dtype, description)
    family = FAMILIES[description.family]
    model = _build(files, family)
    windows = _windows(model, description)[layers.start : layers.stop]
    weights = split_by_part(open_weights(files, model, family), family, description.num_layers, str(files.path))
    owned = {part: weights.pop(part) for part in _owned(layers, description)}
    weights.clear()  # what other stages own is never read
    total = sum(array.nbytes for part in owned.values() for array in part.values())
    predicate = getattr(model, "cast_predicate", None)
    loader = PartLoader(
        quantization=description.quantization,
        dequantize=dequantize,
        dtype=compute,
        keep=(lambda name: not predicate(name)) if predicate else (lambda name: False),
        loaded=_counter(progress, total),
    )
    modules = _load_parts(model, family, owned, loader, _cutters(family, description, layers, shard))
    if adapter is not None:
        adapters = AdapterLoader(adapter, family.layers, description, shard)
        for i in layers:
            adapters.apply(i, modules[i])
    if shard is not None and tensor_parallel is not None:
        for i in layers:
            divide_layer(modules[i], shard, description, tensor_parallel)
    parts = _parts(modules, layers, description, shard)
    return StageModel(parts, layers, description, model.args, compute, windows, shard, tensor_parallel)


def _check(
    layers: range, description: ModelDescription, shard: Shard | None, tensor_parallel: TensorParallel | None
) -> None:
    count = description.num_layers
    if layers.step != 1 or not 0 <= layers.start < layers.stop <= count:
        raise LayoutError(f"layers {layers} are not a range of the model's {count}", param="layer_split")
    if shard is not None and tensor_parallel is None:
        raise LayoutError(f"rank {shard.rank} of {shard.size} needs the other ranks of its stage to compute with")


def _parts(
    modules: dict[str | int, nn.Module], layers: range, description: ModelDescription, shard: Shard | None
) -> _Parts:
    first, last = layers.start == 0, layers.stop == description.num_layers
    embed = modules.get("embed")
    tied = embed if last and description.tied_head else None
    if tied is not None and first and shard is not None and shard.vocab_sizes:
        tied = rows_of(tied, shard.vocab)
    return _Parts(
        layers=tuple(modules[i] for i in layers),
        embed=embed if first else None,
        norm=modules.get("norm"),
        head=modules.get("head"),
        tied=tied,
    )


def _cutters(
    family: Family, description: ModelDescription, layers: range, shard: Shard | None
) -> dict[str | int, Cutter]:
    """How each part is cut; parts that are not listed are whole: norm, and the first stage's embedding."""
    if shard is None:
        return {}
    cutters: dict[str | int, Cutter] = {i: layer_cutter(f"{family.layers}.{i}", shard, description) for i in layers}
    if shard.vocab_sizes:
        cutters["head"] = head_cutter(family.head, shard, description)
        if layers.start > 0:
            cutters["embed"] = head_cutter(family.embed, shard, description)
    return cutters


def _owned(layers: range, description: ModelDescription) -> list[str | int]:
    """Parts that the stage with `layers` holds, in the order of loading.

    The largest tensors come first: what is whole in memory until it is cut then adds nothing to the peak.
    """
    first, last = layers.start == 0, layers.stop == description.num_layers
    owned: list[str | int] = []
    if last:
        owned += ["norm"] if description.tied_head else ["head", "norm"]
    if first or (last and description.tied_head):
        owned.append("embed")
    return [*owned, *layers]


def _compute_dtype(dtype: str, description: ModelDescription) -> mx.Dtype:
    """Type to cast weights to. On a GPU that is the embedding's, also for a few norms stored in another."""
    if dtype == "auto":
        on_cpu = mx.default_device().type == mx.DeviceType.cpu
        return mx.float32 if on_cpu else DTYPES[description.dtype]
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype} is not one of auto, {', '.join(DTYPES)}", param="dtype")
    return DTYPES[dtype]


def _build(files: ModelFiles, family: Family) -> nn.Module:
    """mlx-lm's model with random weights, which stay lazy and are never computed."""
    module = importlib.import_module(f"mlx_lm.models.{family.module}")
    config = read_config(files.path)
    try:
        return module.Model(module.ModelArgs.from_dict(config))
    except (TypeError, ValueError, KeyError, AttributeError, AssertionError, IndexError) as error:
        raise BrokenModel(
            f"{files.path}/config.json: does not describe a model: {one_line(error)}", param="model"
        ) from error


def _windows(model: nn.Module, description: ModelDescription) -> list[int | None]:
    """Attention window of each layer, None for full attention, from mlx-lm's own choice of caches."""
    if not hasattr(model, "make_cache"):
        return [None] * description.num_layers
    windows: list[int | None] = []
    for cache in model.make_cache():
        if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", None):
            raise BrokenModel(
                f"{description.family}: its cache {type(cache).__name__} is not one that Tandem runs", param="model"
            )
        windows.append(getattr(cache, "max_size", None))
    return windows


def _load_parts(
    model: nn.Module,
    family: Family,
    owned: dict[str | int, dict[str, mx.array]],
    loader: PartLoader,
    cutters: dict[str | int, Cutter],
) -> dict[str | int, nn.Module]:
    roots = {"embed": family.embed, "norm": family.norm, "head": family.head}
    modules: dict[str | int, nn.Module] = {}
    for part, weights in owned.items():
        root = f"{family.layers}.{part}" if isinstance(part, int) else roots[part]
        modules[part] = loader.load(root, _at(model, root), weights, cutters.get(part))
        mx.clear_cache()  # buffers of the packed originals
    return modules


def _at(model: nn.Module, path: str) -> nn.Module:
    def step(node: Any, name: str) -> Any:
        return node[int(name)] if isinstance(node, list) else getattr(node, name)

    return reduce(step, path.split("."), model)


def _counter(progress: Callable[[int, int], None] | None, total: int) -> Callable[[int], None]:
    done = 0

    def loaded(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return loaded
