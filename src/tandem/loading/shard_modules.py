"""Tensor parallelism in a model's modules: cutting weights, and all-reducing outputs (mlx)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten

from tandem.errors import LayoutError, UnsupportedModel
from tandem.models.description import ModelDescription
from tandem.models.families.cuts import Cut, Sharding
from tandem.models.families.sharding import SHARDING
from tandem.models.shard import Part, Shard, head_units, in_heads, part_of

_MATRIX = ("weight", "scales", "biases")
_HEADS = ("n_heads", "num_heads", "num_attention_heads", "n_head")
_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_REPEATS = ("repeats", "num_key_value_groups")
_VOCAB = Cut("rows", ("vocab",))


class TensorParallel(Protocol):
    """Collectives among the ranks of one stage. All ranks make the same calls in the same order.

    Results are bit-identical on all ranks, since each rank's router and sampler decide independently.
    """

    def sum(self, x: mx.array) -> mx.array:
        """Return the sum of all ranks' `x`, which has the same shape and type on each."""
        ...

    def gather_last(self, x: mx.array, sizes: Sequence[int]) -> mx.array:
        """Return all ranks' `x` concatenated along the last axis in rank order; `sizes` are their last dimensions."""
        ...


class Around(nn.Module):
    """Wrapper of a module that passes attribute reads on to it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        """Return the wrapped module's attribute; models read, for example, whether a layer's attention is local."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self:
                raise
            return getattr(self["module"], name)


class OverRanks(Around):
    """Wrapper of a module around which the ranks of a stage all-reduce."""

    def __init__(self, module: nn.Module, tensor_parallel: TensorParallel) -> None:
        super().__init__(module)
        self._tensor_parallel = tensor_parallel


class SumOverRanks(OverRanks):
    """Wrapper of a module with partial sums as output; returns the all-reduced sum."""

    def __call__(self, *args: object, **kwargs: object) -> mx.array:
        """Return the module's outputs [B, L, H], summed over the ranks."""
        return self._tensor_parallel.sum(self.module(*args, **kwargs))


class TakesSum(OverRanks):
    """Wrapper of a module with partial sums as input; passes it the all-reduced sum."""

    def __call__(self, x: mx.array) -> mx.array:
        """Return the module's outputs for inputs [B, L, W] summed over the ranks."""
        outputs: mx.array = self.module(self._tensor_parallel.sum(x))
        return outputs


class OwnWidth(Around):
    """Wrapper of attention that derives its heads' total width from its input. It is called with zeros as wide as this
    rank's heads, and with projections computed beforehand."""

    def __init__(self, attention: nn.Module, width: int) -> None:
        super().__init__(attention)
        self._width = width

    def __call__(self, x: mx.array, *args: object, **kwargs: object) -> mx.array:
        """Map inputs [B, L, H] to outputs [B, L, H]."""
        inner, own = self.module, copy.copy(self.module)
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(own, name, _fixed(getattr(inner, name)(x)))
        outputs: mx.array = own(mx.zeros((*x.shape[:-1], self._width), x.dtype), *args, **kwargs)
        return outputs


def _fixed(value: mx.array) -> Callable[[mx.array], mx.array]:
    return lambda _: value


class PassesNothing(Around):
    """Router wrapper for all ranks but 0: sets the weights of zero-computation (identity) experts to 0, so that they
    count once."""

    def __init__(self, router: nn.Module, experts: int) -> None:
        """Wrap `router`; `experts` is the number of routed experts, whose numbers come first."""
        super().__init__(router)
        self._experts = experts

    def __call__(self, x: mx.array) -> tuple[mx.array, mx.array]:
        """Map inputs [B, L, H] to expert numbers and weights, each [B, L, K]."""
        indices, weights = self.module(x)
        return indices, mx.where(indices < self._experts, weights, 0)


class NormOverRanks(OverRanks):
    """RMS norm over an axis split over the ranks, optionally gated: sums of squares are all-reduced."""

    def __init__(self, norm: nn.Module, width: int, tensor_parallel: TensorParallel) -> None:
        """Wrap `norm`; `width` is the length of the whole axis."""
        super().__init__(norm, tensor_parallel)
        self._width = width

    def __call__(self, x: mx.array, gate: mx.array | None = None) -> mx.array:
        """Return this rank's part [..., W] of the normalised axis."""
        gate_last = getattr(self.module, "norm_before_gate", False)
        if gate is not None and not gate_last:
            x = nn.silu(gate) * x
        wide = x.astype(mx.float32)
        squares = self._tensor_parallel.sum(wide.square().sum(axis=-1, keepdims=True))
        eps = getattr(self.module, "eps", None) or self.module.variance_epsilon
        y = (wide * mx.rsqrt(squares / self._width + eps) * self.module.weight).astype(x.dtype)
        gated: mx.array = nn.silu(gate) * y if gate is not None and gate_last else y
        return gated


class OwnExperts(Around):
    """Wrapper of the routed experts that this rank holds whole; outputs of other experts are 0."""

    def __init__(self, experts: nn.Module, own: range) -> None:
        super().__init__(experts)
        self._own = own

    def __call__(self, x: mx.array, indices: mx.array) -> mx.array:
        """Map inputs [..., H] and expert numbers [..., K] to outputs [..., K, H]."""
        here = mx.logical_and(indices >= self._own.start, indices < self._own.stop)
        # An absent expert is replaced by one that the token uses here, so that no other weights are read.
        local = mx.where(here, indices.astype(mx.int32) - self._own.start, 0)
        local = mx.where(here, local, local.max(axis=-1, keepdims=True))
        return mx.where(here[..., None], self.module(x, local), 0)


@dataclass(frozen=True)
class Slice:
    """Part of a parameter on one rank: pieces of one axis. A bias added after the sum is complete on rank 0 and zero on
    other ranks."""

    axis: int
    part: Part
    bias: bool = False
    exact: bool = True
    """Whether the axis has exactly `part.total` entries, unless packed; otherwise it may have a multiple."""


class Cutter:
    """Cuts the parameters of one part of the model (a layer, the embedding, the head) to those of a rank."""

    def __init__(
        self,
        root: str,
        find: Callable[[str], Cut | None],
        shard: Shard,
        description: ModelDescription,
        *,
        sharding: Sharding | None = None,
    ) -> None:
        """Store the rules. `root` is the part's path, for messages. `find` returns the cut of a path within it, or
        raises KeyError. `sharding`: rules of a layer."""
        self._root = root
        self._sharding = sharding
        self._find = find
        self._shard = shard
        self._description = description

    def slice_of(self, name: str) -> Slice | None:
        """Return the slice of parameter `name` to keep; None for all of it. Raise `UnsupportedModel` for a name without
        a rule."""
        base, _, last = name.rpartition(".")
        cut = self._cut(base, name)
        if cut is None:
            return None
        if "experts" in cut.kinds and self._shard.whole_experts:
            return Slice(0, Part(self._description.num_experts, (self._shard.experts,)))
        if last == "global_scale":
            return None
        d = self._description
        axes = {"rows": -2 if last in _MATRIX else -1, "columns": -1, "first": 0, "heads": -2, "last": -1}
        bias = cut.axis == "columns" and last not in _MATRIX
        exact = self._sharding is None or _is_exact(self._sharding, cut, d)
        return Slice(axes[cut.axis], part_of(cut, self._shard, d), bias=bias, exact=exact)

    def take(self, name: str, array: mx.array) -> mx.array:
        """Return this rank's part of a stored parameter, lazily; it shares no memory with the whole."""
        found = self.slice_of(name)
        if found is None:
            return array
        if found.bias:
            return array if self._shard.rank == 0 else mx.zeros_like(array)
        return take(array, found, f"{self._root}.{name}")

    def narrow(self, module: nn.Module) -> None:
        """Cut all parameters of `module`, which holds the part as attribute `part`, lazily."""
        cut = [(name, self.take(name.removeprefix("part."), array)) for name, array in tree_flatten(module.parameters())]
        module.update(tree_unflatten(cut))

    def _cut(self, base: str, name: str) -> Cut | None:
        for path in (name, base):
            try:
                return self._find(path)
            except KeyError:
                continue
        raise UnsupportedModel(
            f"{self._root}.{name}: how to divide it is not known; use --pipeline-parallel-size instead of --tensor-parallel-size",
            param="tensor_parallel_size",
        )


def layer_cutter(root: str, layer: nn.Module, shard: Shard, description: ModelDescription) -> Cutter:
    """Return the cutter of the decoder layer at path `root`."""
    sharding = sharding_of(description, layer)
    return Cutter(root, sharding.cut_of, shard, description, sharding=sharding)


def _is_exact(sharding: Sharding, cut: Cut, description: ModelDescription) -> bool:
    """Return True if an axis has exactly `part.total` entries in all layers; in some families layers have a multiple."""
    heads = sharding.loose_heads and all(in_heads(description, kind) for kind in cut.kinds)
    return not heads and not (sharding.loose_mlp and set(cut.kinds) == {"mlp"})


def is_whole(layer: nn.Module, path: str, description: ModelDescription) -> bool:
    """Return True if the module at `path` of a split layer is replicated on all ranks."""
    try:
        return sharding_of(description, layer).cut_of(path) is None
    except KeyError:  # inside the replacement of a split module
        return False


def head_cutter(root: str, shard: Shard, description: ModelDescription) -> Cutter:
    """Return the cutter of an output projection, or of an embedding used as one: split by rows of the vocabulary."""
    return Cutter(root, lambda path: _VOCAB, shard, description)


def sharding_of(description: ModelDescription, layer: nn.Module) -> Sharding:
    """Return the rules that split a layer. Raise `UnsupportedModel` without the reason; `plan_shards` gives it."""
    sharding = SHARDING.get(description.layer_type or description.family)
    if sharding is None:
        raise UnsupportedModel(f"{description.family} does not run tensor-parallel", param="tensor_parallel_size")
    return sharding.of([name for name, _ in tree_flatten(layer.parameters())])


def take(array: mx.array, found: Slice, name: str) -> mx.array:
    """Return the pieces of one axis, concatenated. A packed axis has fewer entries than elements; raise LayoutError for
    a cut inside an entry."""
    size, total = array.shape[found.axis], found.part.total
    if found.exact and found.axis != -1 and size != total or total == 0:
        raise LayoutError(f"{name}: {size} rows, where config.json makes {total}", param="model")
    pieces = []
    for piece in found.part.pieces:
        start, stop = piece.start * size, piece.stop * size
        if start % total or stop % total:
            raise LayoutError(
                f"{name}: elements {piece.start} to {piece.stop} of {total} do not end with a quantisation group; use "
                "--dequantize yes",
                param="dequantize",
            )
        pieces.append(_sliced(array, found.axis, start // total, stop // total))
    return mx.contiguous(pieces[0] if len(pieces) == 1 else mx.concatenate(pieces, axis=found.axis))


def _sliced(array: mx.array, axis: int, start: int, stop: int) -> mx.array:
    if axis == 0:
        return array[start:stop]
    return array[..., start:stop] if axis == -1 else array[..., start:stop, :]


def whole_groups(found: Slice, group: int) -> tuple[Slice, Slice]:
    """Split a cut of packed input columns in two: whole quantisation groups before expansion, then the rest of the cut."""
    (piece,) = found.part.pieces
    start = piece.start // group * group
    stop = -(-piece.stop // group) * group
    inner = range(piece.start - start, piece.stop - start)
    outer = Slice(-1, Part(found.part.total, (range(start, stop),)))
    return outer, Slice(-1, Part(stop - start, (inner,)))


def divide(layer: nn.Module, shard: Shard, description: ModelDescription) -> None:
    """Adapt a layer with cut weights to its fewer heads and widths; its outputs become partial sums."""
    sharding = sharding_of(description, layer)
    if sharding.attention_path and has(layer, sharding.attention_path):
        _divide_heads(at(layer, sharding.attention_path), sharding, shard, description)
    for path, kinds in sharding.counts.items():
        holder, _, name = path.rpartition(".")
        if has(layer, holder):
            _count(layer, holder, name, part_of(Cut("rows", kinds), shard, description))
    for path, kind in sharding.lists.items():
        holder, _, name = path.rpartition(".")
        if has(layer, holder):
            (own_range,) = part_of(Cut("rows", (kind,)), shard, description).pieces
            owner = at(layer, holder)
            setattr(owner, name, getattr(owner, name)[own_range.start : own_range.stop])
    for path in sharding.wide:
        width = part_of(Cut("rows", ("q",)), shard, description)
        put(layer, path, OwnWidth(at(layer, path), sum(map(len, width.pieces))))
    if sharding.passing and shard.rank and has(layer, sharding.passing):
        put(layer, sharding.passing, PassesNothing(at(layer, sharding.passing), description.num_experts))
    if shard.whole_experts:
        for path in sorted(sharding.switches):
            if has(layer, path):
                put(layer, path, OwnExperts(at(layer, path), shard.experts))


def _divide_heads(attention: nn.Module, sharding: Sharding, shard: Shard, description: ModelDescription) -> None:
    units, kv = head_units(description), len(shard.kv_heads)
    if len(shard.queries) * units != kv * description.num_heads:  # several ranks hold the same kv head
        heads, own_heads = description.num_heads, len(shard.queries)
        held_and_own = (_HEADS, heads, own_heads), (_KV_HEADS, units, kv), (_REPEATS, heads // units, own_heads // kv)
        for names, whole, own in held_and_own:
            for name in names:
                if getattr(attention, name, None) == whole:
                    setattr(attention, name, own)
        return
    for names, whole in ((_HEADS, description.num_heads), (_KV_HEADS, description.num_kv_heads)):
        for name in names:
            held = getattr(attention, name, None)
            if held == whole or (held is not None and sharding.loose_heads):
                if held % units:
                    raise LayoutError(
                        f"{held} heads of a layer are not a multiple of {units}, so --tensor-parallel-size cannot divide them",
                        param="tensor_parallel_size",
                    )
                setattr(attention, name, held // units * kv)


def _count(layer: nn.Module, path: str, name: str, part: Part) -> None:
    """Set an attribute that holds a length to the rank's part; an object shared with other modules is copied first."""
    holder: nn.Module = at(layer, path)
    held = getattr(holder, name)
    if held != part.total:
        raise LayoutError(f"{path}.{name} is {held}, where config.json makes {part.total}", param="model")
    if not isinstance(holder, nn.Module):
        holder = copy.copy(holder)
        put(layer, path, holder)
    setattr(holder, name, sum(map(len, part.pieces)))


def sum_outputs(layer: nn.Module, shard: Shard, description: ModelDescription, tp: TensorParallel) -> None:
    """Wrap the modules of a layer that need an all-reduce of their output, input or norm."""
    sharding = sharding_of(description, layer)
    for path, kind in sharding.norms.items():
        if has(layer, path):
            total = part_of(Cut("rows", (kind,)), shard, description).total
            put(layer, path, NormOverRanks(at(layer, path), total, tp))
    for paths, wrapped in ((sharding.sums, SumOverRanks), (sharding.takers, TakesSum)):
        for path in paths:
            if has(layer, path):
                put(layer, path, wrapped(at(layer, path), tp))


def has(module: nn.Module, path: str) -> bool:
    """Return whether a module or attribute exists at `path`."""
    try:
        return at(module, path) is not None
    except (AttributeError, IndexError):
        return False


def at(module: nn.Module, path: str) -> nn.Module:
    """Return the module at `path`, in which a number indexes a list."""
    node: nn.Module = module
    for name in filter(None, path.split(".")):
        node = node[int(name)] if isinstance(node, list) else getattr(node, name)
    found: nn.Module = node
    return found


def put(module: nn.Module, path: str, new: nn.Module) -> None:
    """Replace the module at `path` with `new`."""
    parent, _, name = path.rpartition(".")
    holder: nn.Module = at(module, parent)
    if isinstance(holder, list):
        holder[int(name)] = new
    else:
        setattr(holder, name, new)


class SharedHead(nn.Module):
    """Output projection split by rows over the ranks; callable as a projection or through an embedding's `as_linear`."""

    def __init__(
        self, rows: nn.Module, shard: Shard, tensor_parallel: TensorParallel, *, embedding: nn.Module | None = None
    ) -> None:
        """Wrap `rows`. `embedding`: the model's embedding, if it is used as projection; calls then look up tokens."""
        super().__init__()
        self.rows = rows
        self._sizes, self._tensor_parallel, self._embedding = shard.vocab_sizes, tensor_parallel, embedding

    def __call__(self, x: mx.array) -> mx.array:
        """Map hidden states [B, L, H] to logits [B, L, V]; with an embedding, map tokens [B, L] to hidden states."""
        if self._embedding is not None:
            states: mx.array = self._embedding(x)
            return states
        return self._tensor_parallel.gather_last(self.rows(x), self._sizes)

    def as_linear(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, H] to logits [B, L, V]."""
        return self._tensor_parallel.gather_last(self.rows.as_linear(h), self._sizes)


class EmbeddingAsHead(nn.Module):
    """Replacement for an output projection that the weight files lack."""

    def __init__(self, model: nn.Module, path: str) -> None:
        """Use the embedding at `path` in `model`."""
        super().__init__()
        self._embedding: Callable[[], nn.Module] = lambda: at(model, path)

    def __call__(self, h: mx.array) -> mx.array:
        """Map hidden states [B, L, H] to logits [B, L, V]."""
        logits: mx.array = self._embedding().as_linear(h)
        return logits


def rows_of(embedding: nn.Module, rows: range) -> nn.Module:
    """Return a copy of an embedding with only the rows `rows`, for use as output projection; shares memory with the
    original."""
    part = copy.copy(embedding)
    part.update({name: array[rows.start : rows.stop] for name, array in embedding.parameters().items()})
    return part
