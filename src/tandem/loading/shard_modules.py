"""Tensor parallelism in a model's modules: cutting weights, and summing what the ranks computed (mlx)."""

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
from tandem.models.families.sharding import SHARDING, Cut, Sharding
from tandem.models.shard import Part, Shard, part_of

_MATRIX = ("weight", "scales", "biases")
_HEADS = ("n_heads", "num_heads", "num_attention_heads")
_KV_HEADS = ("n_kv_heads", "num_kv_heads", "num_key_value_heads")
_VOCAB = Cut("rows", ("vocab",))


class TensorParallel(Protocol):
    """Collectives among the ranks of one stage. All ranks make the same calls in the same order.

    Results are the same on all ranks, bit for bit: routers and samplers decide on them on each rank alone.
    """

    def sum(self, x: mx.array) -> mx.array:
        """The sum of all ranks' `x`, which has one shape and type on all of them."""
        ...

    def gather_last(self, x: mx.array, sizes: Sequence[int]) -> mx.array:
        """All ranks' `x` joined along the last axis, in the order of ranks; `sizes` are their last dimensions."""
        ...


class SumOverRanks(nn.Module):
    """A module whose output is this rank's part of a sum; calling it gives the sum."""

    def __init__(self, module: nn.Module, tensor_parallel: TensorParallel) -> None:
        super().__init__()
        self.module = module
        self._tensor_parallel = tensor_parallel

    def __call__(self, *args: Any, **kwargs: Any) -> mx.array:
        """Outputs [B, L, H] of the module, summed over the ranks."""
        return self._tensor_parallel.sum(self.module(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        """The module's, where this has none: models ask their layers' attention whether it is local, and such."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "module" not in self:
                raise
            return getattr(self["module"], name)


@dataclass(frozen=True)
class Slice:
    """What to take of a parameter: pieces of one axis; or, for a bias that counts once, all or zeros."""

    axis: int
    part: Part
    bias: bool = False


class Cutter:
    """Cuts the parameters of one part of the model (a layer, the embedding, the head) to what a rank holds."""

    def __init__(self, root: str, find: Callable[[str], Cut | None], shard: Shard, description: ModelDescription):
        """`root` is the part's path, for messages; `find` gives the cut for a path within it, KeyError if unknown."""
        self._root = root
        self._find = find
        self._shard = shard
        self._description = description

    def slice_of(self, name: str) -> Slice | None:
        """What to take of parameter `name`; None for all of it. Raises `UnsupportedModel` for an unknown name."""
        base, _, last = name.rpartition(".")
        cut = self._cut(base, name)
        if cut is None or last == "global_scale":
            return None
        part = part_of(cut, self._shard, self._description)
        if cut.axis == "rows":
            return Slice(-2 if last in _MATRIX else -1, part)
        return Slice(-1, part, bias=last not in _MATRIX)

    def take(self, name: str, array: mx.array) -> mx.array:
        """This rank's part of a parameter as it is stored, lazily; shares no memory with the whole."""
        found = self.slice_of(name)
        if found is None:
            return array
        if found.bias:
            return array if self._shard.rank == 0 else mx.zeros_like(array)
        return take(array, found, f"{self._root}.{name}")

    def narrow(self, module: nn.Module) -> None:
        """Cut all parameters of `module`, which has the part at `part`, without computing them."""
        names = [name for name, _ in tree_flatten(module.parameters())]
        parameters = dict(tree_flatten(module.parameters()))
        cut = [(name, self.take(name.removeprefix("part."), parameters[name])) for name in names]
        module.update(tree_unflatten(cut))

    def _cut(self, base: str, name: str) -> Cut | None:
        for path in (name, base):
            try:
                return self._find(path)
            except KeyError:
                continue
        raise UnsupportedModel(
            f"{self._root}.{name}: how to divide it is not known; use --pipeline-parallel-size instead of "
            "--tensor-parallel-size",
            param="tensor_parallel_size",
        )


def layer_cutter(root: str, shard: Shard, description: ModelDescription) -> Cutter:
    """For a decoder layer at path `root`."""
    return Cutter(root, sharding_of(description).cut_of, shard, description)


def head_cutter(root: str, shard: Shard, description: ModelDescription) -> Cutter:
    """For a head, or an embedding that is used as one: rows of the vocabulary."""
    return Cutter(root, lambda path: _VOCAB, shard, description)


def sharding_of(description: ModelDescription) -> Sharding:
    """How a family's layers are divided. Raises `UnsupportedModel`; `plan_shards` says why."""
    if description.family not in SHARDING:
        raise UnsupportedModel(f"{description.family} does not run tensor-parallel", param="tensor_parallel_size")
    return SHARDING[description.family]


def take(array: mx.array, found: Slice, name: str) -> mx.array:
    """Pieces of one axis, joined. A packed axis has fewer entries than elements: cuts must fall between entries."""
    size, total = array.shape[found.axis], found.part.total
    if found.axis == -2 and size != total or total == 0:
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
    return array[..., start:stop] if axis == -1 else array[..., start:stop, :]


def whole_groups(found: Slice, group: int) -> tuple[Slice, Slice]:
    """For a cut through packed columns: what to take before expansion (whole groups), and then of the result."""
    (piece,) = found.part.pieces
    start = piece.start // group * group
    stop = -(-piece.stop // group) * group
    inner = range(piece.start - start, piece.stop - start)
    outer = Slice(-1, Part(found.part.total, (range(start, stop),)))
    return outer, Slice(-1, Part(stop - start, (inner,)))


def divide_heads(layer: nn.Module, shard: Shard, description: ModelDescription) -> None:
    """Make a layer that holds cut weights compute with as many heads; its outputs are parts of sums."""
    sharding = sharding_of(description)
    attention = at(layer, sharding.attention)
    group = description.num_heads // description.num_kv_heads
    for names, whole, own in (
        (_HEADS, description.num_heads, len(shard.kv_heads) * group),
        (_KV_HEADS, description.num_kv_heads, len(shard.kv_heads)),
    ):
        for name in names:
            if getattr(attention, name, None) == whole:
                setattr(attention, name, own)


def sum_outputs(layer: nn.Module, description: ModelDescription, tp: TensorParallel) -> None:
    """Sum over the ranks what each computes a part of."""
    for path in sharding_of(description).sums:
        parent, _, name = path.rpartition(".")
        holder = at(layer, parent)
        setattr(holder, name, SumOverRanks(getattr(holder, name), tp))


def at(module: nn.Module, path: str) -> nn.Module:
    """The module at a path, in which a number counts in a list."""
    node: Any = module
    for name in filter(None, path.split(".")):
        node = node[int(name)] if isinstance(node, list) else getattr(node, name)
    found: nn.Module = node
    return found


def put(module: nn.Module, path: str, new: nn.Module) -> None:
    """Put `new` at a path."""
    parent, _, name = path.rpartition(".")
    holder: Any = at(module, parent)
    if isinstance(holder, list):
        holder[int(name)] = new
    else:
        setattr(holder, name, new)


class SharedHead(nn.Module):
    """A head of which each rank has its rows, called as the projection that it is or as an embedding's other side."""

    def __init__(
        self, rows: nn.Module, shard: Shard, tensor_parallel: TensorParallel, *, embedding: nn.Module | None = None
    ) -> None:
        """`embedding`: the head is an embedding's rows, and this looks tokens up."""
        super().__init__()
        self.rows = rows
        self._sizes, self._tensor_parallel, self._embedding = shard.vocab_sizes, tensor_parallel, embedding

    def __call__(self, x: mx.array) -> mx.array:
        """Hidden states [B, L, H] to logits [B, L, V]; or, of an embedding, tokens [B, L] to hidden states."""
        if self._embedding is not None:
            return self._embedding(x)
        return self._tensor_parallel.gather_last(self.rows(x), self._sizes)

    def as_linear(self, h: mx.array) -> mx.array:
        """Hidden states [B, L, H] to logits [B, L, V]."""
        return self._tensor_parallel.gather_last(self.rows.as_linear(h), self._sizes)


class EmbeddingAsHead(nn.Module):
    """In the place of an output projection that the files lack."""

    def __init__(self, model: nn.Module, path: str) -> None:
        """`path` is that of the embedding in `model`."""
        super().__init__()
        self._embedding = lambda: at(model, path)

    def __call__(self, h: mx.array) -> mx.array:
        """Hidden states [B, L, H] to logits [B, L, V]."""
        return self._embedding().as_linear(h)


def rows_of(embedding: nn.Module, rows: range) -> nn.Module:
    """The same embedding with some of its rows, to be used as a head: shares memory with the whole one."""
    part = copy.copy(embedding)
    part.update({name: array[rows.start : rows.stop] for name, array in embedding.parameters().items()})
    return part
