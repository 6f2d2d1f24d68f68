"""Rules that describe how a layer's weights are split for tensor parallelism; `sharding.py` is written in them. No mlx."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from tandem.json_types import JsonMapping
from tandem.models.families.axes import Axes

_NUMBER = re.compile(r"\.\d+\.")
Rule = TypeVar("Rule")
Kind = str
"""Meaning of the elements along a split axis. q: query heads * head_dim; kv: the same for key or value heads;
qkv_groups: per kv head its queries, key and value, fused; q_heads, kv_heads: one entry a head; mlp, experts, shared:
intermediate widths of the dense MLP, of an expert, of the shared experts; vocab: tokens. Other names are keys of the
family's `axes`."""
Width = tuple[str | int, ...] | Callable[[JsonMapping], int]
"""Intermediate width, from config.json: a product of numbers and keys (`a|b`: key b where a is missing), or a function.
An empty tuple: no such MLP."""


@dataclass(frozen=True)
class Cut:
    """Axis along which a module's weight [..., outputs, inputs] is split over the ranks."""

    axis: Literal["rows", "columns", "first", "heads", "last"]
    """rows: split the outputs (vLLM's ColumnParallelLinear). columns: split the inputs and sum the outputs
    (RowParallelLinear). first: axis 0 (heads of a stack [n, outputs, inputs], or channels of a convolution). heads:
    axis -2 of a parameter. last: axis -1 of a parameter."""
    kinds: tuple[Kind, ...]
    """Kinds of the elements along the axis, in order; several for fused projections (q, k, v)."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """Rules that split the layers of one family. All paths are relative to the layer (`self_attn.q_proj`)."""

    cuts: Mapping[str, Cut]
    """Cut by path of a module or bare parameter; `*` matches any number in the path."""
    summed: tuple[str, ...] = ()
    """Modules that return partial sums, if these are others than `sums` takes from the cuts."""
    attention: str | None = None
    """Path of the attention module, if it is another than `attention_path` takes from the cuts; empty if there is none to
    change."""
    whole: frozenset[str] = frozenset()
    """Modules replicated on every rank; `*` matches any number in the path. Modules with `norm` in the last part of their
    path are replicated without an entry."""
    mlp: Width = ("intermediate_size",)
    experts: Width = ()
    shared: Width = ()
    axes: Axes | None = None
    """Function that computes the family's own kinds of axes from config.json; None: no own kinds."""
    counts: Mapping[str, tuple[Kind, ...]] = field(default_factory=dict)
    """Attributes (path and name) that hold the length of an axis of these kinds; each is set to the rank's length."""
    norms: Mapping[str, Kind] = field(default_factory=dict)
    """RMS norms over a split axis, and its kind; their sums of squares are all-reduced."""
    lists: Mapping[str, Kind] = field(default_factory=dict)
    """Lists with one module per unit of an axis, and its kind. Weights are loaded whole and the list is cut afterwards."""
    variants: Mapping[str, Sharding] = field(default_factory=dict)
    """Other rules for layers that have a module or parameter at this path (hybrid models). Widths and axes are those of the
    family alone."""
    loose_heads: bool = False
    """Layers differ in query heads per kv head, so head counts are read from each layer."""
    loose_mlp: bool = False
    """Some layers' MLP width is a multiple of the width in config.json."""
    takers: tuple[str, ...] = ()
    """Modules whose input is a partial sum: it is all-reduced before the call."""
    wide: tuple[str, ...] = ()
    """Attention modules that take their heads' total width from the shape of the input."""
    passing: str = ""
    """Path of a router with zero-computation (identity) experts beside the routed ones. Only rank 0 adds their output;
    empty: none."""

    def of(self, names: Collection[str]) -> Sharding:
        """Return the rules for a layer whose parameters have these names: a variant's, or these."""
        for path, variant in self.variants.items():
            if any(name == path or name.startswith(f"{path}.") for name in names):
                return variant.of(names)
        return self

    @property
    def sums(self) -> tuple[str, ...]:
        """Modules that return partial sums, to be all-reduced: by default the layer's modules with a part cut by columns."""
        return self.summed or tuple({path.partition(".")[0]: cut for path, cut in self.cuts.items() if cut.axis == "columns"})

    @property
    def attention_path(self) -> str:
        """Path of the attention module, whose attributes with head counts are reduced; by default the one cut by query heads."""
        summing = (path.rpartition(".")[0] for path, cut in self.cuts.items() if cut == columns("q"))
        return next(summing, "self_attn") if self.attention is None else self.attention

    @property
    def all_cuts(self) -> list[tuple[str, Cut]]:
        """Cuts of these rules and of all variants, with their paths."""
        return [*self.cuts.items(), *(item for variant in self.variants.values() for item in variant.all_cuts)]

    @property
    def switches(self) -> set[str]:
        """Paths of modules with routed experts, called as (inputs, expert indices)."""
        return {path.rpartition(".")[0] for path, cut in self.cuts.items() if "experts" in cut.kinds}

    def keeps(self, name: str) -> bool:
        """Return True if the rules list the parameter `name` as replicated on every rank."""
        for path in (name, name.rpartition(".")[0]):
            with contextlib.suppress(KeyError):
                return self.cut_of(path) is None
        return False

    def cut_of(self, path: str) -> Cut | None:
        """Return the cut of a module or parameter; None if it is replicated. Raise KeyError for a path without a rule."""
        if (found := self.cuts.get(path) or self.cuts.get(_NUMBER.sub(".*.", path))) is not None:
            return found
        if {path, _NUMBER.sub(".*.", path)} & self.whole or "norm" in path.rpartition(".")[2]:
            return None
        if any(path.startswith(f"{one}.") for one in self.lists):
            return None
        raise KeyError(path)


def rows(*kinds: Kind) -> Cut:
    """Split a weight's output axis (vLLM's ColumnParallelLinear); several kinds for fused projections."""
    return Cut("rows", kinds)


def first(*kinds: Kind) -> Cut:
    """Split axis 0: the heads of a weight [heads, outputs, inputs], or the channels of a convolution."""
    return Cut("first", kinds)


def columns(kind: Kind) -> Cut:
    """Split a weight's input axis; outputs are partial sums to be all-reduced (vLLM's RowParallelLinear)."""
    return Cut("columns", (kind,))


def attention(path: str = "self_attn", out: str = "o_proj", kinds: tuple[Kind, Kind, Kind] = ("q", "kv", "q")) -> dict[str, Cut]:
    """Cuts of attention at `path`; `out` is the name of its output projection. `kinds`: of queries, of keys and values, and of
    the output projection's inputs."""
    q, kv, inputs = kinds
    return {f"{path}.q_proj": rows(q), **each(rows(kv), path, "k_proj", "v_proj"), f"{path}.{out}": columns(inputs)}


def fused(path: str, qkv: str, out: str, *kinds: Kind) -> dict[str, Cut]:
    """Cuts of attention at `path` whose queries, keys and values come from one projection, by default one after another."""
    return {f"{path}.{qkv}": rows(*kinds or ("q", "kv", "kv")), f"{path}.{out}": columns("q")}


def glu(
    path: str = "mlp", kind: Kind = "mlp", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> dict[str, Cut]:
    """Cuts of a gated MLP at `path`, whose intermediate width is of `kind`; the others are names of its matrices."""
    return {f"{path}.{gate}": rows(kind), f"{path}.{up}": rows(kind), f"{path}.{down}": columns(kind)}


def two(up: str, down: str, path: str = "mlp", kind: Kind = "mlp") -> dict[str, Cut]:
    """Cuts of an MLP of two matrices, named `up` and `down`, at `path`."""
    return {f"{path}.{up}": rows(kind), f"{path}.{down}": columns(kind)}


def experts(path: str = "mlp", *, routed: str = "switch_mlp", shared: str = "shared_experts") -> dict[str, Cut]:
    """Cuts of gated routed and shared experts below `path`."""
    return glu(f"{path}.{routed}", "experts") | glu(f"{path}.{shared}", "shared")


def each(rule: Rule, path: str, *names: str) -> dict[str, Rule]:
    """Return the same rule, such as a cut, for several modules, parameters or attributes of `path`."""
    return {f"{path}.{name}": rule for name in names}
