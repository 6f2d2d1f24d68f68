"""Part of every layer that each rank of a tensor-parallel stage holds. Pure, no mlx."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import LayoutError
from tandem.models.description import ModelDescription
from tandem.models.families.cuts import Cut, Kind, Sharding
from tandem.models.families.sharding import NOT_SHARDED, SHARDING
from tandem.protocol.layout import StageSpec

_FLAG = "--tensor-parallel-size"
_PARAM = "tensor_parallel_size"
_HEADS: tuple[Kind, ...] = ("q", "kv", "qkv_groups", "q_heads", "kv_heads")
_QUERIES: tuple[Kind, ...] = ("q", "q_heads")
_WIDTHS: tuple[Kind, ...] = ("mlp", "experts", "shared", "vocab")
_STEPS = (64, 32, 16, 8, 4, 2)  # widths that suit matrix kernels, if quantisation groups require no step


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part of a stage on one rank. The ranks' ranges are consecutive and cover each axis once, but for repeated kv
    heads."""

    rank: int
    size: int
    """Number of ranks in the stage."""
    kv_heads: range
    """Key and value heads, in units of `head_units`. With more ranks than units, several ranks hold the same one."""
    queries: range
    """Query heads: all that read `kv_heads`, or a part of them where ranks share a kv head."""
    states: range
    """Heads, groups of heads or channels of recurrent layers."""
    mlp: range
    """Range of the dense MLP's intermediate width."""
    experts: range
    """Range of each expert's intermediate width; with `whole_experts` a range of experts."""
    whole_experts: bool
    shared: range
    """Range of the shared experts' intermediate width."""
    vocab: range
    """Rows of the output projection (tokens of the vocabulary)."""
    vocab_sizes: tuple[int, ...]
    """Rows of the output projection on each rank; empty if one rank holds all."""


@dataclass(frozen=True)
class Part:
    """Elements of a split axis on one rank: `pieces` of `total` elements, in order."""

    total: int
    pieces: tuple[range, ...]


def plan_shards(
    description: ModelDescription,
    size: int,
    *,
    weights: Sequence[float] | None = None,
    dequantize: bool = False,
    expert_parallel: bool = False,
) -> tuple[Shard, ...]:
    """Split a model's layers over `size` ranks.

    `weights` are the ranks' shares in any unit, such as speed or memory (default: equal). Attention is split between kv
    heads, as close to the shares as whole heads allow. MLP and expert widths compensate, so that each rank's part of a
    layer's weights matches its share. If weights stay packed (not `dequantize`), cuts through a matrix's inputs fall
    between quantisation groups. The output projection is split by rows. With `expert_parallel` each rank holds whole
    routed experts instead of a part of each. Raise `LayoutError` with the number in the way and a value that works.
    """
    d = description
    if size < 1:
        raise LayoutError(f"{_FLAG} must be at least 1, is {size}", param=_PARAM)
    shares = _shares(weights, size)
    if size == 1:
        return (_whole(d),)
    sharding = _sharding(d, size)
    kv = _divided(d, sharding, shares, "heads", dequantize)
    states = _divided(d, sharding, shares, "states", dequantize)
    queries = _queries(d, sharding, kv, 1 if dequantize else _group(d, sharding, "q"))
    attention = [len(heads) / d.num_heads for heads in queries] if _uses(d, sharding, "heads") else shares
    costs = _costs(d, sharding)
    dense = _balanced(shares, attention, costs["attention"], costs["mlp"])
    sparse = _balanced(shares, attention, costs["attention"], costs["experts"] + costs["shared"])

    def widths(kind: Kind, width: int, fractions: Sequence[float]) -> tuple[range, ...]:
        step = 1 if dequantize else _group(d, sharding, kind)
        return _ranges(width, step, fractions, kind)

    mlp = widths("mlp", d.mlp_width, dense)
    experts = _whole_experts(d, sparse) if expert_parallel else widths("experts", d.expert_width, sparse)
    shared = widths("shared", d.shared_width, sparse)
    vocab = _ranges(d.vocab_size, 1, shares, "vocab")
    sizes = tuple(len(rows) for rows in vocab)
    return tuple(
        Shard(
            rank=i,
            size=size,
            kv_heads=kv[i],
            queries=queries[i],
            states=states[i],
            mlp=mlp[i],
            experts=experts[i],
            whole_experts=expert_parallel,
            shared=shared[i],
            vocab=vocab[i],
            vocab_sizes=sizes,
        )
        for i in range(size)
    )


def rank_shard(description: ModelDescription, spec: StageSpec, *, dequantize: bool) -> Shard:
    """Return the part that a rank holds. Raise `LayoutError` as `plan_shards` does."""
    shards = plan_shards(
        description, spec.tp_size, weights=spec.tensor_split, dequantize=dequantize, expert_parallel=spec.expert_parallel
    )
    return shards[spec.tp_rank]


def part_of(cut: Cut, shard: Shard, description: ModelDescription) -> Part:
    """Return the elements of an axis split by `cut` that `shard` holds, counted in the unpacked matrix."""
    total, pieces = 0, []
    for kind in cut.kinds:
        count, unit, own = _axis(kind, shard, description)
        pieces.append(range(total + own.start * unit, total + own.stop * unit))
        total += count * unit
    return Part(total, tuple(pieces))


def _axis(kind: Kind, shard: Shard, d: ModelDescription) -> tuple[int, int, range]:
    """Return the number of units, elements per unit, and the rank's range of units."""
    if kind in d.axes:
        axis = d.axes[kind]
        owned = {"heads": shard.kv_heads, "queries": shard.queries, "states": shard.states}
        return axis.count, axis.unit, owned.get(axis.base, range(axis.count))
    if kind in _QUERIES:
        return d.num_heads, d.head_dim if kind == "q" else 1, shard.queries
    if kind in _HEADS:
        group = d.num_heads // d.num_kv_heads
        units = {"kv": d.head_dim, "qkv_groups": (group + 2) * d.head_dim}
        return d.num_kv_heads, units.get(kind, 1), shard.kv_heads
    if kind == "mlp":
        return d.mlp_width, 1, shard.mlp
    if kind == "experts":
        return d.expert_width, 1, shard.experts
    if kind == "shared":
        return d.shared_width, 1, shard.shared
    return d.vocab_size, 1, shard.vocab


def _whole(d: ModelDescription) -> Shard:
    return Shard(
        rank=0,
        size=1,
        kv_heads=range(_count(d, "heads")),
        queries=range(d.num_heads),
        states=range(_count(d, "states")),
        mlp=range(d.mlp_width),
        experts=range(d.expert_width),
        whole_experts=False,
        shared=range(d.shared_width),
        vocab=range(d.vocab_size),
        vocab_sizes=(),
    )


def _shares(weights: Sequence[float] | None, size: int) -> list[float]:
    given = [float(w) for w in weights] if weights is not None else [1.0] * size
    if len(given) != size:
        raise LayoutError(f"{len(given)} weights of ranks do not fit {_FLAG} {size}", param=_PARAM)
    if not all(math.isfinite(w) and w > 0 for w in given):
        shown = ", ".join(f"{w:g}" for w in given)
        raise LayoutError(f"weights of ranks must be positive numbers, are {shown}", param=_PARAM)
    return [w / sum(given) for w in given]


def _sharding(d: ModelDescription, size: int) -> Sharding:
    sharding = SHARDING.get(d.layer_type or d.family)
    if sharding is None:
        reason = NOT_SHARDED.get(d.family, "its type is not listed")
        stages = min(size, d.num_layers - len(d.uncut))
        raise LayoutError(
            f"{d.family} does not run tensor-parallel: {reason}; use --pipeline-parallel-size {stages}", param=_PARAM
        )
    if sharding.mlp and not d.mlp_width and not d.expert_width:
        raise LayoutError(f"config.json of this {d.family} model names no MLP width, so {_FLAG} cannot divide it", param=_PARAM)
    known = {*d.axes, *_HEADS, *_WIDTHS}
    if unknown := sorted(kind for kinds in _kinds(sharding).values() for kind in kinds if kind not in known):
        raise LayoutError(
            f"{d.family}: the figures by which {_FLAG} divides {unknown[0]} are not known; use --pipeline-parallel-size",
            param=_PARAM,
        )
    if d.num_heads % d.num_kv_heads:
        raise LayoutError(
            f"{d.num_heads} heads are not a multiple of {d.num_kv_heads} kv heads, so {_FLAG} cannot divide them", param=_PARAM
        )
    return sharding


_NAMES = {"heads": "kv heads", "states": "units of recurrent state"}


def _kinds(sharding: Sharding) -> dict[str, set[Kind]]:
    """Return the kinds of split axes, by axis of the cut (rows, columns, ...)."""
    kinds: dict[str, set[Kind]] = {}
    for _, cut in sharding.all_cuts:
        kinds.setdefault(cut.axis, set()).update(cut.kinds)
    return kinds


def _base(d: ModelDescription, kind: Kind) -> str:
    """Return what ranks distribute when an axis of this kind is split: `heads`, `states`, `whole`, or the kind itself."""
    base = d.axes[kind].base if kind in d.axes else "heads" if kind in _HEADS else kind
    return "heads" if base == "queries" else base


def _uses(d: ModelDescription, sharding: Sharding, base: str) -> bool:
    return any(_base(d, kind) == base for kinds in _kinds(sharding).values() for kind in kinds)


def _count(d: ModelDescription, base: str) -> int:
    """Return the number of units of a base over all ranks."""
    own = next((axis.count for axis in d.axes.values() if axis.base == base), 0)
    return own or (d.num_kv_heads if base == "heads" else 0)


def in_heads(d: ModelDescription, kind: Kind) -> bool:
    """Return True if an axis of this kind is split between attention heads."""
    return _base(d, kind) == "heads"


def head_units(d: ModelDescription) -> int:
    """Return the number of units into which attention can be split: kv heads, or fewer if layers differ in them."""
    return _count(d, "heads")


def held_kv_heads(description: ModelDescription, shard: Shard) -> int:
    """Return the number of the model's kv heads (as config.json counts them) that `shard` holds."""
    return len(shard.kv_heads) * description.num_kv_heads // max(head_units(description), 1)


def _divided(d: ModelDescription, sharding: Sharding, shares: Sequence[float], base: str, dequantize: bool) -> tuple[range, ...]:
    """Return each rank's range of kv heads or recurrent units; the full range if no layer has any."""
    size, count, name = len(shares), _count(d, base), _NAMES[base]
    if not _uses(d, sharding, base):
        return (range(count),) * size
    if base == "heads" and size > count and _can_repeat(d, sharding, size):
        each = size // count
        return tuple(range(rank // each, rank // each + 1) for rank in range(size))
    if size > count:
        more = next((n for n in range(size, d.num_heads + 1) if base == "heads" and _can_repeat(d, sharding, n)), 0)
        raise LayoutError(
            f"{_FLAG} {size} is more than the model's {count} {name}; use at most {max(count, 1)}"
            + (f" (or {more})" if more else "")
            + ", and --pipeline-parallel-size for more ranks",
            param=_PARAM,
        )
    unit, whole = 1, _whole(d)
    for kind in _kinds(sharding).get("columns", ()):
        if dequantize or _base(d, kind) != base:
            continue
        group = _group(d, sharding, kind)
        width = part_of(Cut("columns", (kind,)), whole, d).total // count  # inputs of the output projection
        unit = math.lcm(unit, group // math.gcd(group, width))
        if count // unit < size:
            raise LayoutError(
                f"{_FLAG} {size}: {width} {'attention ' if base == 'heads' else ''}outputs a "
                f"{'kv head' if base == 'heads' else 'unit of recurrent state'} in quantisation groups of {group} "
                f"allow cuts after every {unit} of the {count} {name} only; use at most {max(1, count // unit)}, or "
                "--dequantize yes",
                param=_PARAM,
            )
    counts = [units * unit for units in _apportion(count // unit, shares)]
    counts[-1] += count % unit
    return _consecutive(counts)


def _can_repeat(d: ModelDescription, sharding: Sharding, size: int) -> bool:
    """Return True if several ranks may hold the same kv head, each with some of its query heads. Queries, keys and
    values must be separate projections, without a norm over all keys."""
    kinds = {kind for found in _kinds(sharding).values() for kind in found if in_heads(d, kind)}
    plain = kinds <= {*_QUERIES, "kv", "kv_heads", "q_gate"} and "kv" in kinds and not sharding.lists
    fits = size % d.num_kv_heads == 0 and d.num_heads % size == 0
    return plain and fits and "kv" not in sharding.norms.values() and not sharding.loose_heads


def _queries(d: ModelDescription, sharding: Sharding, kv: Sequence[range], group: int) -> tuple[range, ...]:
    """Return each rank's range of query heads; cuts of the output projection's inputs fall between quantisation groups
    of `group`."""
    size, units = len(kv), _count(d, "heads")
    if size <= units or not _uses(d, sharding, "heads"):
        each = d.num_heads // max(units, 1)
        return tuple(range(own.start * each, own.stop * each) for own in kv)
    each = d.num_heads // size
    step = group // math.gcd(group, d.head_dim)
    if each % step:
        raise LayoutError(
            f"{_FLAG} {size}: {d.head_dim} attention outputs a head in quantisation groups of {group} allow cuts after "
            f"every {step} heads only, and each rank would have {each}; use at most {units}, or --dequantize yes",
            param=_PARAM,
        )
    return tuple(range(rank * each, (rank + 1) * each) for rank in range(size))


def _whole_experts(d: ModelDescription, shares: Sequence[float]) -> tuple[range, ...]:
    size = len(shares)
    if not d.num_experts:
        raise LayoutError(
            f"--expert-parallel: {d.family} has no experts that ranks could hold whole; leave it out", param="expert_parallel"
        )
    if d.num_experts < size:
        raise LayoutError(
            f"--expert-parallel: the model's {d.num_experts} experts are fewer than {size} ranks; use "
            f"{_FLAG} {d.num_experts} at most, or leave out --expert-parallel",
            param="expert_parallel",
        )
    return _consecutive(_apportion(d.num_experts, shares))


def _group(d: ModelDescription, sharding: Sharding, kind: Kind) -> int:
    """Return the elements between allowed cuts of packed matrices that are split by columns of `kind`."""
    if d.quantization is None:
        return 1
    default = int(d.quantization["group_size"])
    names = [path for path, cut in sharding.all_cuts if cut == Cut("columns", (kind,))]
    groups = [default]
    for path, settings in d.quantization.items():
        if isinstance(settings, dict) and any(path.endswith(f".{name}") for name in names):
            groups.append(int(settings.get("group_size", default)))
    return math.lcm(*groups)


def _costs(d: ModelDescription, sharding: Sharding) -> dict[str, int]:
    """Return a layer's weights per component (attention, mlp, experts, shared), in multiples of the hidden size."""
    whole = _whole(d)
    costs = {"attention": 0, "mlp": 0, "experts": 0, "shared": 0}
    for cut in sharding.cuts.values():
        for kind in cut.kinds:
            base = _base(d, kind)
            if cut.axis not in ("rows", "columns") or base not in ("heads", *_WIDTHS):
                continue  # recurrent layers replace attention in some layers, and are split in the same shares
            if kind not in ("q_heads", "kv_heads"):  # norms and the like
                costs["attention" if base == "heads" else base] += part_of(Cut(cut.axis, (kind,)), whole, d).total
    costs["experts"] *= d.num_experts
    return costs


def _balanced(shares: Sequence[float], attention: Sequence[float], own: int, mlp: int) -> list[float]:
    """Return MLP shares that give each rank its total share of attention (cost `own`) and MLP (cost `mlp`) weights."""
    if not mlp:
        return list(shares)
    wanted = [max(0.0, s * (own + mlp) - a * own) for s, a in zip(shares, attention, strict=True)]
    return [w / sum(wanted) for w in wanted]


def _ranges(width: int, step: int, fractions: Sequence[float], kind: Kind) -> tuple[range, ...]:
    """Return consecutive ranges of `width` with lengths in multiples of `step`, as close to `fractions` as possible."""
    size = len(fractions)
    if width == 0:
        return (range(0),) * size
    if width % step:
        raise LayoutError(
            f"{_FLAG} {size}: the {kind} width {width} is not a multiple of the quantisation group {step}; use "
            + ("--expert-parallel, " if kind == "experts" else "")
            + "--dequantize yes, or --pipeline-parallel-size",
            param=_PARAM,
        )
    if step == 1:
        step = next((s for s in _STEPS if width % s == 0 and width >= 16 * s * size), 1)
    if width // step < size:
        raise LayoutError(
            f"{_FLAG} {size}: the {kind} width {width} has {width // step} parts of {step}; use at most "
            f"{width // step}"
            + (", or --expert-parallel" if kind == "experts" else "")
            + (", or --dequantize yes" if step > 1 else ""),
            param=_PARAM,
        )
    return _consecutive([count * step for count in _apportion(width // step, fractions)])


def _apportion(units: int, shares: Sequence[float]) -> list[int]:
    """Return integers that sum to `units`, each at least 1, as close to `shares` as possible; ties favour the lower
    rank."""
    counts = [max(1, math.floor(units * share)) for share in shares]

    def surplus(i: int) -> float:
        return counts[i] - units * shares[i]

    while sum(counts) < units:
        counts[min(range(len(counts)), key=surplus)] += 1
    while sum(counts) > units:
        counts[max((i for i in range(len(counts)) if counts[i] > 1), key=surplus)] -= 1
    return counts


def _consecutive(counts: Sequence[int]) -> tuple[range, ...]:
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    return tuple(range(end - count, end) for end, count in zip(ends, counts, strict=True))
