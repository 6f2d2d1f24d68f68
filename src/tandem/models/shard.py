"""Which part of every layer each rank of a tensor-parallel stage holds. Pure, no mlx."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.errors import LayoutError
from tandem.models.description import ModelDescription
from tandem.models.families.sharding import NOT_SHARDED, SHARDING, Cut, Kind, Sharding

_FLAG = "--tensor-parallel-size"
_PARAM = "tensor_parallel_size"
_ATTENTION: tuple[Kind, ...] = ("q", "kv", "qkv_groups")
_STEPS = (64, 32, 16, 8, 4, 2)  # widths that matrix kernels like, where nothing else demands a step


@dataclass(frozen=True, kw_only=True)
class Shard:
    """What one rank of a stage holds. The shards of all ranks cover each range once, in the order of the ranks."""

    rank: int
    size: int
    """Ranks of the stage."""
    kv_heads: range
    """Key and value heads, with the query heads that belong to them."""
    mlp: range
    """Of the dense MLP's intermediate width."""
    experts: range
    """Of each expert's intermediate width."""
    shared: range
    """Of the shared experts' intermediate width."""
    vocab: range
    """Rows of the head."""
    vocab_sizes: tuple[int, ...]
    """Rows of the head that each rank holds; empty where every rank holds the whole head."""


@dataclass(frozen=True)
class Part:
    """What a rank holds of a divided axis: the pieces of `total` elements, in order."""

    total: int
    pieces: tuple[range, ...]


def plan_shards(
    description: ModelDescription,
    size: int,
    *,
    weights: Sequence[float] | None = None,
    dequantize: bool = False,
    split_head: bool = True,
) -> tuple[Shard, ...]:
    """Divide a model's layers over `size` ranks.

    `weights` are the ranks' shares (speed or memory, in any unit; by default all alike). Attention is cut between kv
    heads, as near to the shares as whole heads allow; MLP and expert widths then make up for it, so that each rank's
    part of a layer's weights is its share. Where weights stay packed (not `dequantize`), cuts through the inputs of a
    matrix fall between quantisation groups. With `split_head` the head is divided too, by rows.
    Raises `LayoutError` naming the figure in the way and what would work.
    """
    d = description
    if size < 1:
        raise LayoutError(f"{_FLAG} must be at least 1, is {size}", param=_PARAM)
    shares = _shares(weights, size)
    if size == 1:
        return (_whole(d),)
    sharding = _sharding(d)
    kv = _kv_heads(d, sharding, shares, dequantize)
    attention = [len(heads) / d.num_kv_heads for heads in kv]
    costs = _costs(d, sharding)
    dense = _balanced(shares, attention, costs["attention"], costs["mlp"])
    sparse = _balanced(shares, attention, costs["attention"], costs["experts"] + costs["shared"])

    def widths(kind: Kind, width: int, fractions: Sequence[float]) -> tuple[range, ...]:
        step = 1 if dequantize else _group(d, sharding, kind)
        return _ranges(width, step, fractions, kind)

    mlp = widths("mlp", d.mlp_width, dense)
    experts = widths("experts", d.expert_width, sparse)
    shared = widths("shared", d.shared_width, sparse)
    vocab = _ranges(d.vocab_size, 1, shares, "vocab") if split_head else (range(d.vocab_size),) * size
    sizes = tuple(len(rows) for rows in vocab) if split_head else ()
    return tuple(
        Shard(
            rank=i, size=size, kv_heads=kv[i], mlp=mlp[i], experts=experts[i], shared=shared[i], vocab=vocab[i],
            vocab_sizes=sizes,
        )
        for i in range(size)
    )


def part_of(cut: Cut, shard: Shard, description: ModelDescription) -> Part:
    """What `shard` holds of an axis that is divided by `cut`: elements of the expanded matrix."""
    total, pieces = 0, []
    for kind in cut.kinds:
        count, unit, own = _axis(kind, shard, description)
        pieces.append(range(total + own.start * unit, total + own.stop * unit))
        total += count * unit
    return Part(total, tuple(pieces))


def _axis(kind: Kind, shard: Shard, d: ModelDescription) -> tuple[int, int, range]:
    """Units in all, elements in a unit, and the rank's range of units."""
    group = d.num_heads // d.num_kv_heads
    heads: dict[Kind, int] = {
        "q": group * d.head_dim,
        "kv": d.head_dim,
        "qkv_groups": (group + 2) * d.head_dim,
        "q_heads": group,
        "kv_heads": 1,
    }
    if kind in heads:
        return d.num_kv_heads, heads[kind], shard.kv_heads
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
        kv_heads=range(d.num_kv_heads),
        mlp=range(d.mlp_width),
        experts=range(d.expert_width),
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


def _sharding(d: ModelDescription) -> Sharding:
    sharding = SHARDING.get(d.family)
    if sharding is None:
        reason = NOT_SHARDED.get(d.family, "how its layers divide is not known")
        raise LayoutError(
            f"{d.family} does not run tensor-parallel: {reason}; use --pipeline-parallel-size", param=_PARAM
        )
    if not d.mlp_width and not d.expert_width:
        raise LayoutError(
            f"config.json of this {d.family} model names no MLP width, so {_FLAG} cannot divide it", param=_PARAM
        )
    if d.num_heads % d.num_kv_heads:
        raise LayoutError(
            f"{d.num_heads} heads are not a multiple of {d.num_kv_heads} kv heads, so {_FLAG} cannot divide them",
            param=_PARAM,
        )
    return sharding


def _kv_heads(
    d: ModelDescription, sharding: Sharding, shares: Sequence[float], dequantize: bool
) -> tuple[range, ...]:
    size, heads = len(shares), d.num_kv_heads
    if size > heads:
        raise LayoutError(
            f"{_FLAG} {size} is more than the model's {heads} kv heads; use at most {heads}, and "
            "--pipeline-parallel-size for more ranks",
            param=_PARAM,
        )
    group = 1 if dequantize else _group(d, sharding, "q")
    width = d.num_heads // heads * d.head_dim  # inputs of the output projection that belong to one kv head
    unit = group // math.gcd(group, width)
    if heads // unit < size:
        raise LayoutError(
            f"{_FLAG} {size}: {width} attention outputs a kv head in quantisation groups of {group} allow cuts after "
            f"every {unit} of the {heads} kv heads only; use at most {max(1, heads // unit)}, or --dequantize yes",
            param=_PARAM,
        )
    counts = _apportion(heads // unit, shares)
    counts = [count * unit for count in counts]
    counts[-1] += heads % unit
    return _consecutive(counts)


def _group(d: ModelDescription, sharding: Sharding, kind: Kind) -> int:
    """Elements between the places where packed matrices that are divided by columns of `kind` can be cut."""
    if d.quantization is None:
        return 1
    default = int(d.quantization["group_size"])
    names = [path for path, cut in sharding.cuts.items() if cut == Cut("columns", (kind,))]
    groups = [default]
    for path, settings in d.quantization.items():
        if isinstance(settings, dict) and any(path.endswith(f".{name}") for name in names):
            groups.append(int(settings.get("group_size", default)))
    return math.lcm(*groups)


def _costs(d: ModelDescription, sharding: Sharding) -> dict[str, int]:
    """Weights of a layer by what divides them, in rows or columns of the hidden size."""
    whole = _whole(d)
    costs = {"attention": 0, "mlp": 0, "experts": 0, "shared": 0}
    for cut in sharding.cuts.values():
        for kind in cut.kinds:
            if kind in ("q_heads", "kv_heads"):
                continue  # norms and the like
            width = part_of(Cut(cut.axis, (kind,)), whole, d).total
            costs["attention" if kind in _ATTENTION else kind] += width
    costs["experts"] *= d.num_experts
    return costs


def _balanced(shares: Sequence[float], attention: Sequence[float], own: int, mlp: int) -> list[float]:
    """Shares of the MLP with which each rank gets its share of attention (cost `own`) and MLP (cost `mlp`) together."""
    if not mlp:
        return list(shares)
    wanted = [max(0.0, s * (own + mlp) - a * own) for s, a in zip(shares, attention, strict=True)]
    return [w / sum(wanted) for w in wanted]


def _ranges(width: int, step: int, fractions: Sequence[float], kind: Kind) -> tuple[range, ...]:
    """Consecutive ranges of `width` whose lengths are multiples of `step`, as near to `fractions` as that allows."""
    size = len(fractions)
    if width == 0:
        return (range(0),) * size
    if width % step:
        raise LayoutError(
            f"{_FLAG} {size}: the {kind} width {width} is not a multiple of the quantisation group {step}; use "
            "--dequantize yes, or --pipeline-parallel-size",
            param=_PARAM,
        )
    if step == 1:
        step = next((s for s in _STEPS if width % s == 0 and width >= 16 * s * size), 1)
    if width // step < size:
        raise LayoutError(
            f"{_FLAG} {size}: the {kind} width {width} has {width // step} parts of {step}; use at most "
            f"{width // step}" + (", or --dequantize yes" if step > 1 else ""),
            param=_PARAM,
        )
    return _consecutive([count * step for count in _apportion(width // step, fractions)])


def _apportion(units: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers that add up to `units`, at least 1 each, nearest to `shares`; ties go to the lower rank."""
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
