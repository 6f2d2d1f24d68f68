"""The words in which `sharding.py` says how layers are divided for tensor parallelism. No mlx."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from tandem.json_types import JsonMapping
from tandem.models.families.axes import Axes

_NUMBER = re.compile(r"\.\d+\.")
Kind = str
"""Units of a divided axis: query widths (q), key or value widths (kv), fused (queries, key, value) per kv head
(qkv_groups), one entry per query head or per kv head (q_heads, kv_heads), the widths of MLP, expert and shared expert
(mlp, experts, shared), tokens of the vocabulary (vocab); or one of the family's own `axes`."""
Width = tuple[str | int, ...] | Callable[[JsonMapping], int]
"""A figure of config.json: the product of numbers and keys (`a|b`: b where a is missing), or what computes it; empty:
there is none."""


@dataclass(frozen=True)
class Cut:
    """How a module's weight [..., rows, columns] is divided."""

    axis: Literal["rows", "columns", "first", "heads", "last"]
    """rows: each rank has its part of the outputs; columns: of the inputs, and outputs are summed over the ranks;
    first: of a stack of matrices, or the channels of a convolution; heads and last: the last axis but one, and the
    last, of what is no matrix."""
    kinds: tuple[Kind, ...]
    """Kinds of units along the axis, in order: several where projections are fused."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How a family's layers are divided. Paths are those within a layer."""

    cuts: Mapping[str, Cut]
    """By path of the module, or of a parameter that a module holds itself; `*` is any number in it."""
    sums: tuple[str, ...]
    """Modules whose outputs are partial and are summed over the ranks."""
    attention: str = "self_attn"
    """Module that holds the numbers of heads."""
    whole: frozenset[str] = frozenset()
    """Modules that every rank has whole, besides all those with `norm` in the last part of their path."""
    mlp: Width = ("intermediate_size",)
    experts: Width = ()
    shared: Width = ()
    axes: Axes | None = None
    """The family's own kinds of axes."""
    counts: Mapping[str, tuple[Kind, ...]] = field(default_factory=dict)
    """Numbers that modules hold (path and name), which are lengths of axes of these kinds."""
    norms: Mapping[str, Kind] = field(default_factory=dict)
    """Norms over a divided axis: their sums of squares are summed over the ranks."""
    lists: Mapping[str, Kind] = field(default_factory=dict)
    """Lists of modules with one for each unit of an axis. They are cut when they are loaded: they are small."""
    variants: Mapping[str, Sharding] = field(default_factory=dict)
    """Layers that have the module or parameter of this path are divided so instead."""
    loose_heads: bool = False
    """Layers differ in how many query heads a kv head has."""
    loose_mlp: bool = False
    """Some layers have an MLP that is a multiple as wide."""
    takers: tuple[str, ...] = ()
    """Modules whose inputs are partial and are summed over the ranks first."""
    wide: tuple[str, ...] = ()
    """Attention that takes the width of what it gets for that of its heads together."""
    passing: str = ""
    """A router that also chooses experts beyond the routed ones, which pass on what they get: one rank counts them."""

    def of(self, names: Collection[str]) -> Sharding:
        """How a layer with parameters of these names is divided."""
        for path, variant in self.variants.items():
            if any(name == path or name.startswith(f"{path}.") for name in names):
                return variant.of(names)
        return self

    @property
    def all_cuts(self) -> list[tuple[str, Cut]]:
        """Cuts of all layers, with their paths."""
        return [*self.cuts.items(), *(item for variant in self.variants.values() for item in variant.all_cuts)]

    @property
    def switches(self) -> set[str]:
        """Modules that hold routed experts: called with inputs and the numbers of experts."""
        return {path.rpartition(".")[0] for path, cut in self.cuts.items() if "experts" in cut.kinds}

    def keeps(self, name: str) -> bool:
        """True when a parameter of this name is listed as whole on every rank."""
        for path in (name, name.rpartition(".")[0]):
            with contextlib.suppress(KeyError):
                return self.cut_of(path) is None
        return False

    def cut_of(self, path: str) -> Cut | None:
        """The cut for a module or parameter; None where it is whole. Raises KeyError for a path that is not listed."""
        if (found := self.cuts.get(path) or self.cuts.get(_NUMBER.sub(".*.", path))) is not None:
            return found
        if path in self.whole or "norm" in path.rpartition(".")[2]:
            return None
        if any(path.startswith(f"{one}.") for one in self.lists):
            return None
        raise KeyError(path)


def rows(*kinds: Kind) -> Cut:
    """Outputs are divided."""
    return Cut("rows", kinds)


def first(*kinds: Kind) -> Cut:
    """A stack of matrices, or the channels of a convolution."""
    return Cut("first", kinds)


def columns(kind: Kind) -> Cut:
    """Inputs are divided."""
    return Cut("columns", (kind,))


def attention(path: str = "self_attn", out: str = "o_proj") -> dict[str, Cut]:
    """Plain attention; `out` is the name of its output projection."""
    return {
        f"{path}.q_proj": rows("q"),
        f"{path}.k_proj": rows("kv"),
        f"{path}.v_proj": rows("kv"),
        f"{path}.{out}": columns("q"),
    }


def glu(path: str = "mlp", kind: Kind = "mlp") -> dict[str, Cut]:
    """A gated linear unit."""
    return {f"{path}.gate_proj": rows(kind), f"{path}.up_proj": rows(kind), f"{path}.down_proj": columns(kind)}


def two(up: str, down: str, path: str = "mlp") -> dict[str, Cut]:
    """An MLP of two matrices."""
    return {f"{path}.{up}": rows("mlp"), f"{path}.{down}": columns("mlp")}
