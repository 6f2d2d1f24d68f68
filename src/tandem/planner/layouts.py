"""Enumeration of arrangements of machines: all candidates, or those of a manual layout. Pure.

The enumeration does not depend on the machines' memory, so more memory only adds layouts that fit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import chain, combinations, permutations
from typing import NamedTuple

from tandem.errors import LayoutError
from tandem.models.description import ModelDescription
from tandem.models.partition import split_layers
from tandem.models.shard import held_kv_heads, plan_shards
from tandem.planner.hardware import Machine, Network
from tandem.planner.types import Layout, ManualLayout

MAX_TENSOR_PARALLEL = 8
"""Largest size of MLX's RDMA mesh in ranks."""
_EXHAUSTIVE = 5
"""Most machines for which every subset and every sequence of stage sizes is tried."""
_LOPSIDED = 1e9
_KEYS = ("tp", "pp", "dp", "layers", "split", "machines")

Allowed = Callable[[tuple[int, ...]], bool]
"""Predicate: True if the model can be split into stages of these sizes."""
Groups = tuple[tuple[int, ...], ...]
"""Machines (indices) of each stage of one replica."""
Arrangement = tuple[Groups, ...]
"""Machines (indices) of each stage of each replica."""


class _Division(NamedTuple):
    """Result of splitting a layer over ranks."""

    heads: tuple[int, ...] | None = None
    """Kv heads of each rank; None if the layer cannot be split this way."""
    whole_experts: bool = False
    """Whether ranks hold whole experts, which are too narrow to be split."""
    refusal: str | None = None


class Divider:
    """Cached results of `plan_shards`: how a layer can be split over the machines of a stage."""

    def __init__(self, description: ModelDescription, *, dequantize: bool) -> None:
        self._description, self._dequantize = description, dequantize
        self._divided = cache(self._divide)
        least = self.heads((1.0, _LOPSIDED))
        step = least[0] if least else 0
        self.step = step if step and description.num_kv_heads % step == 0 else 0
        """Granularity in kv heads at which attention can be split; 0 if it cannot be split evenly."""

    def heads(self, shares: Sequence[float]) -> tuple[int, ...] | None:
        """Return the kv heads of each machine with these shares; None if the layers cannot be split this way."""
        return self._divided(len(shares), tuple(shares)).heads

    def refusal(self, size: int) -> str | None:
        """Return the reason why `size` machines cannot share a layer; None if they can."""
        if size > MAX_TENSOR_PARALLEL:
            return f"tensor parallel goes up to {MAX_TENSOR_PARALLEL} machines"
        uneven = None if self.step else "attention cannot be cut evenly between its kv heads"
        return self._divided(size).refusal or uneven

    def whole_experts(self, size: int) -> bool:
        """Return whether `size` machines hold whole experts, which are too narrow to be split over them.

        Splitting each expert's width is faster, since all machines then read equally many bytes.
        """
        return self.refusal(size) is None and self._divided(size).whole_experts

    def _divide(self, size: int, weights: tuple[float, ...] | None = None) -> _Division:
        refusal = ""
        for whole in (False, True) if self._description.num_experts and size > 1 else (False,):
            try:
                shards = plan_shards(self._description, size, weights=weights, dequantize=self._dequantize, expert_parallel=whole)
            except LayoutError as error:
                refusal = refusal or error.message
            else:
                return _Division(tuple(held_kv_heads(self._description, shard) for shard in shards), whole)
        return _Division(refusal=refusal)


# ---- all arrangements


def arrangements(layers: int, divider: Divider, machines: Sequence[Machine], network: Network) -> Iterator[Arrangement]:
    """Yield all arrangements to compare, without duplicates that only exchange equal machines."""

    def allowed(sizes: tuple[int, ...]) -> bool:
        return len(sizes) <= layers and not any(s > 1 and divider.refusal(s) for s in sizes)

    single = ((groups,) for subset in _subsets(machines) for groups in _shapes(allowed, subset, machines))
    seen: set[object] = set()
    for arrangement in chain(single, _replicated(allowed, machines)):
        if not all(_joined(groups, network) for groups in arrangement):
            continue
        key = tuple(sorted(tuple(tuple(sorted(network.kinds[i] for i in g)) for g in groups) for groups in arrangement))
        if key not in seen:
            seen.add(key)
            yield arrangement


def kind_of(arrangement: Arrangement, network: Network) -> object:
    """Return a key that is equal for arrangements that differ only in the order of machines and stages."""
    members = tuple(sorted(network.kinds[i] for groups in arrangement for g in groups for i in g))
    return len(arrangement), tuple(sorted(len(g) for g in arrangement[0])), members


def label(layout: Layout, machines: Sequence[Machine]) -> str:
    """Return a layout's name, such as `DP 2 x TP 2 (a + b ; c + d)`: + separates machines of a stage, | stages, ;
    replicas."""
    names = " ; ".join(
        " | ".join(" + ".join(machines[i].name for i in stage.machines) for stage in stages) for stages in layout.replicas
    )
    sizes = tuple(len(stage.machines) for stage in layout.replicas[0])
    if len(set(sizes)) > 1:
        parts = ["stages " + ",".join(map(str, sizes))]
    else:
        parts = ([f"TP {sizes[0]}"] if sizes[0] > 1 else []) + ([f"PP {len(sizes)}"] if len(sizes) > 1 else [])
    if len(layout.replicas) > 1:
        parts = [f"DP {len(layout.replicas)}", *parts]
    return f"{' x '.join(parts) or 'single'} ({names})"


def _replicated(allowed: Allowed, machines: Sequence[Machine]) -> Iterator[Arrangement]:
    """Yield replicas of equal shape, over machines in the given order and from fast to slow."""
    count = len(machines)
    for size in range(1, count // 2 + 1):
        for replicas in range(2, count // size + 1):
            for order in (tuple(range(count)), _by_speed(machines)):
                teams = [order[i * size : (i + 1) * size] for i in range(replicas)]
                for sizes in _compositions(allowed, size):
                    yield tuple(_cut(team, sizes) for team in teams)


def _subsets(machines: Sequence[Machine]) -> Iterator[tuple[int, ...]]:
    every = tuple(range(len(machines)))
    if len(every) <= _EXHAUSTIVE:
        for size in range(1, len(every) + 1):
            yield from combinations(every, size)
        return
    yield from ((i,) for i in every)
    for order in (every, _by_speed(machines)):
        yield from (tuple(sorted(order[:size])) for size in range(2, len(every) + 1))


def _shapes(allowed: Allowed, subset: tuple[int, ...], machines: Sequence[Machine]) -> Iterator[Groups]:
    if len(subset) <= 3:
        orders = list(permutations(subset))
    else:
        fast = tuple(i for i in _by_speed(machines) if i in subset)
        orders = [subset, fast, fast[::-1]]
    for order in dict.fromkeys(orders):
        for sizes in _compositions(allowed, len(subset)):
            yield _cut(order, sizes)


def _compositions(allowed: Allowed, count: int) -> Iterator[tuple[int, ...]]:
    """Yield allowed sequences of stage sizes with sum `count`; above `_EXHAUSTIVE` machines only equal sizes."""
    for cuts in range(2 ** (count - 1)) if count <= _EXHAUSTIVE else ():
        ends = [i + 1 for i in range(count - 1) if cuts >> i & 1] + [count]
        sizes = tuple(b - a for a, b in zip([0, *ends], ends, strict=False))
        if allowed(sizes):
            yield sizes
    for size in range(1, count + 1) if count > _EXHAUSTIVE else ():
        if count % size == 0 and allowed((size,) * (count // size)):
            yield (size,) * (count // size)


def _cut(order: Sequence[int], sizes: tuple[int, ...]) -> Groups:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(tuple(order[a : a + n]) for a, n in zip(starts, sizes, strict=True))


def _by_speed(machines: Sequence[Machine]) -> tuple[int, ...]:
    return tuple(sorted(range(len(machines)), key=lambda i: (-machines[i].bandwidth, i)))


def _joined(groups: Groups, network: Network) -> bool:
    inside = all(network.worst(g) is not None for g in groups if len(g) > 1)
    ring = [*groups, groups[0]]
    return inside and all(network.between(a[0], i) is not None for a, b in zip(ring, ring[1:], strict=False) if a != b for i in b)


# ---- manual layouts


def parse_layout(text: str) -> ManualLayout:
    """Parse a manual layout: `single`, `tp=2`, `pp=2 layers=20,16`, `tp=2,1` (sizes per stage), `dp=2 tp=2`,
    `machines=b,a` ...

    Words are separated by spaces. `tp` is one size or one per stage. `split` has the share of each machine of a stage,
    as in --tensor-split. Raise `LayoutError` naming the word.
    """
    values: dict[str, str] = {}
    for word in text.split():
        key, equals, value = word.partition("=")
        if word == "single":
            continue
        if not equals or key not in _KEYS or key in values:
            raise LayoutError(
                f"--layout {text!r}: {word!r} is not understood; words are single, {', '.join(k + '=' for k in _KEYS)}",
                param="layout",
            )
        values[key] = value

    def numbers(key: str) -> tuple[int, ...] | None:
        value = values.get(key)
        if value is None:
            return None
        if not re.fullmatch(r"[1-9]\d{0,5}(,[1-9]\d{0,5})*", value):
            raise LayoutError(f"--layout {text!r}: {key}={value} must be whole numbers, such as {key}=2,1", param="layout")
        if key in ("pp", "dp") and "," in value:
            raise LayoutError(f"--layout {text!r}: {key}={value} must be one number", param="layout")
        return tuple(int(n) for n in value.split(","))

    sizes = numbers("tp") or (1,)
    (depth,) = numbers("pp") or (len(sizes),)
    if len(sizes) == 1:
        sizes *= depth
    if len(sizes) != depth:
        raise LayoutError(
            f"--layout {text!r}: tp has {len(sizes)} sizes for pp={depth} stages; give one, or one per stage", param="layout"
        )
    (replicas,) = numbers("dp") or (1,)
    return ManualLayout(
        stages=sizes,
        replicas=replicas,
        layers=numbers("layers"),
        split=numbers("split"),
        machines=tuple(values["machines"].split(",")) if "machines" in values else None,
    )


def arrangement_of(manual: ManualLayout, model: ModelDescription, divider: Divider, machines: Sequence[Machine]) -> Arrangement:
    """Return the machines of each stage of each replica. Raise `LayoutError` for a layout that model or hosts rule out."""
    size = sum(manual.stages)
    order = _order(manual, machines)
    if min(manual.stages) < 1 or manual.replicas < 1:
        raise LayoutError("--layout: sizes must be at least 1", param="layout")
    if size * manual.replicas > len(order):
        raise LayoutError(
            f"--layout needs {size * manual.replicas} machines, there are {len(order)}; add hosts or use a smaller layout",
            param="layout",
        )
    for ranks in manual.stages:
        if ranks > 1 and (why := divider.refusal(ranks)):
            raise LayoutError(f"--layout: {why}", param="layout")
    split_layers(model.num_layers, len(manual.stages), explicit=manual.layers, uncut=model.uncut)
    _check_split(manual, divider)
    return tuple(_cut(order[r * size : (r + 1) * size], manual.stages) for r in range(manual.replicas))


def _order(manual: ManualLayout, machines: Sequence[Machine]) -> tuple[int, ...]:
    if manual.machines is None:
        return tuple(range(len(machines)))
    names = [m.name for m in machines]
    for name in manual.machines:
        if name not in names or manual.machines.count(name) > 1:
            raise LayoutError(
                f"--layout machines={','.join(manual.machines)}: {name} is not one of {', '.join(names)}, or is there twice",
                param="layout",
            )
    return tuple(names.index(n) for n in manual.machines)


def _check_split(manual: ManualLayout, divider: Divider) -> None:
    if manual.split is None:
        return
    shown = ",".join(map(str, manual.split))
    if any(size != len(manual.split) for size in manual.stages):
        raise LayoutError(
            f"--layout split={shown}: give one share for each machine of a stage; stages have "
            f"{','.join(map(str, manual.stages))}",
            param="layout",
        )
    if len(manual.split) > 1 and divider.heads([x / sum(manual.split) for x in manual.split]) is None:
        raise LayoutError(f"--layout split={shown}: the layers cannot be divided so unevenly", param="layout")
