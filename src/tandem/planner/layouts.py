"""Which arrangements of machines are worth a look. Pure.

What is enumerated does not depend on the machines' memory, so that more memory only ever adds layouts that fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, permutations

from tandem.planner.hardware import Machine, Network
from tandem.planner.shares import Divider
from tandem.planner.solve import Groups
from tandem.planner.types import Layout

MAX_TENSOR_PARALLEL = 8
"""MLX's RDMA mesh has at most this many ranks."""
_EXHAUSTIVE = 5
"""Machines up to which every subset and every sequence of stage sizes is tried."""

Allowed = Callable[[tuple[int, ...]], bool]
"""Whether the model can be divided into stages of these sizes."""
Arrangement = tuple[Groups, ...]
"""Machines of each stage of each replica."""


def why_not_tensor_parallel(divider: Divider, size: int) -> str | None:
    """Why layers cannot be shared by `size` machines, or None if they can."""
    if size > MAX_TENSOR_PARALLEL:
        return f"tensor parallel goes up to {MAX_TENSOR_PARALLEL} machines"
    return divider.refusal(size)


def arrangements(layers: int, divider: Divider, machines: Sequence[Machine], network: Network) -> Iterator[Arrangement]:
    """All arrangements to be compared, each once: machines that are alike are not exchanged for one another."""

    def allowed(sizes: tuple[int, ...]) -> bool:
        return len(sizes) <= layers and not any(s > 1 and why_not_tensor_parallel(divider, s) for s in sizes)

    kinds = _kinds(machines, network)
    seen: set[object] = set()
    for arrangement in (*_single_replicas(allowed, machines), *_replicated(allowed, machines)):
        if not all(_joined(groups, network) for groups in arrangement):
            continue
        key = tuple(sorted(tuple(tuple(sorted(kinds[i] for i in g)) for g in groups) for groups in arrangement))
        if key not in seen:
            seen.add(key)
            yield arrangement


def kind_of(arrangement: Arrangement, machines: Sequence[Machine], network: Network) -> object:
    """Equal for arrangements that differ in the order of machines and stages only."""
    kinds = _kinds(machines, network)
    members = tuple(sorted(kinds[i] for groups in arrangement for g in groups for i in g))
    return len(arrangement), tuple(sorted(len(g) for g in arrangement[0])), members


def label(layout: Layout | Arrangement, machines: Sequence[Machine]) -> str:
    """Such as `DP 2 x TP 2 (a + b ; c + d)`: + joins the machines of a stage, | stages, ; replicas."""
    if isinstance(layout, Layout):
        layout = tuple(tuple(s.machines for s in stages) for stages in layout.replicas)
    names = " ; ".join(" | ".join(" + ".join(machines[i].name for i in group) for group in groups) for groups in layout)
    shape = shape_label(tuple(len(g) for g in layout[0]))
    if len(layout) > 1:
        shape = f"DP {len(layout)}" + ("" if shape == "single" else f" x {shape}")
    return f"{shape} ({names})"


def shape_label(sizes: tuple[int, ...]) -> str:
    """Name of a replica with that many machines in each stage."""
    if len(set(sizes)) > 1:
        return "stages " + ",".join(map(str, sizes))
    parts = ([f"TP {sizes[0]}"] if sizes[0] > 1 else []) + ([f"PP {len(sizes)}"] if len(sizes) > 1 else [])
    return " x ".join(parts) or "single"


def _single_replicas(allowed: Allowed, machines: Sequence[Machine]) -> Iterator[Arrangement]:
    for subset in _subsets(machines):
        for groups in _shapes(allowed, subset, machines):
            yield (groups,)


def _replicated(allowed: Allowed, machines: Sequence[Machine]) -> Iterator[Arrangement]:
    """Replicas of equal shape over machines in the given order, and from fast to slow."""
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
    """Stage sizes that add up to `count` and that the model allows; beyond a few machines only equal ones."""
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
    return inside and all(
        network.between(a[0], i) is not None for a, b in zip(ring, ring[1:], strict=False) if a != b for i in b
    )


def _kinds(machines: Sequence[Machine], network: Network) -> list[int]:
    """A number per machine; machines that are alike in all but name have the same."""
    if not network.uniform:
        return list(range(len(machines)))
    facts = [(m.memory, m.bandwidth, m.flops, m.gpu, m.layer_overhead, m.measured) for m in machines]
    return [facts.index(f) for f in facts]
