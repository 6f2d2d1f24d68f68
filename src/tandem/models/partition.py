"""Split of a model's layers into pipeline stages, and the places where no split is possible. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import LayoutError
from tandem.json_types import JsonMapping

_SHARED_BY_DEFAULT = {"gemma4": 20, "gemma4_text": 20, "gemma4_unified": 20}
"""Number of last layers that reuse earlier layers' keys and values, if config.json does not give it."""


def split_layers(
    num_layers: int,
    stages: int,
    *,
    layer_bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    explicit: Sequence[int] | None = None,
    uncut: frozenset[int] = frozenset(),
) -> tuple[range, ...]:
    """Return one contiguous range of layers per stage; each layer is in exactly one stage, and no stage is empty.

    `explicit` (layers per stage) takes precedence. Otherwise each stage's sum of `layer_bytes` (default: equal) is
    proportional to its `memory`, the bytes for weights (default: equal). Cuts are chosen in order, each closest to its
    target. No stage begins at a layer of `uncut`. Raise `LayoutError` naming the flag to change.
    """
    if stages < 1:
        raise LayoutError(f"--pipeline-parallel-size must be at least 1, is {stages}", param="pipeline_parallel_size")
    if explicit is not None:
        return _explicit(num_layers, stages, explicit, uncut)
    if stages > num_layers:
        raise LayoutError(
            f"--pipeline-parallel-size {stages} is more than the model's {num_layers} layers", param="pipeline_parallel_size"
        )
    starts = [i for i in range(num_layers) if i not in uncut]
    if stages > len(starts):
        raise LayoutError(
            f"--pipeline-parallel-size {stages}: the model has {num_layers} layers, of which {_together(uncut)}; it "
            f"can be cut into {len(starts)} stages at most",
            param="pipeline_parallel_size",
        )
    sizes = list(layer_bytes) if layer_bytes is not None else [1] * num_layers
    shares = list(memory) if memory is not None else [1] * stages
    if len(sizes) != num_layers or len(shares) != stages:
        raise LayoutError(
            f"{len(sizes)} layer sizes and {len(shares)} memory sizes do not fit {num_layers} layers, {stages} stages"
        )
    if min(shares) <= 0:
        stage = shares.index(min(shares))
        raise LayoutError(f"stage {stage} has no memory for weights; give --layer-split or fewer stages", param="layer_split")
    ends = [*starts[1:], num_layers]
    parts = _proportional([sum(sizes[a:b]) for a, b in zip(starts, ends, strict=True)], shares)
    return tuple(range(starts[part.start], ends[part.stop - 1]) for part in parts)


def _together(uncut: frozenset[int]) -> str:
    """Return a clause for errors: `layers 13 to 34 share keys and values and stay in one stage`."""
    first = min(uncut) - 1
    last = next(i for i in range(first + 1, max(uncut) + 2) if i not in uncut) - 1
    more = ", as others do" if max(uncut) > last else ""
    return f"layers {first} to {last} share keys and values and stay in one stage{more}"


def _nearest(num_layers: int, ends: Sequence[int], uncut: frozenset[int]) -> list[int] | None:
    """Return layers per stage of an allowed split near the one whose stages end at `ends`; None if there is none."""
    allowed, found = [i for i in range(1, num_layers) if i not in uncut], [0]
    for left, end in zip(range(len(ends) - 2, -1, -1), ends[:-1], strict=True):
        free = [i for i in allowed if i > found[-1]]
        free = free[: len(free) - left]
        if not free:
            return None
        found.append(min(free, key=lambda i: abs(i - end)))
    found.append(num_layers)
    return [b - a for a, b in zip(found, found[1:], strict=False)]


def _explicit(num_layers: int, stages: int, explicit: Sequence[int], uncut: frozenset[int]) -> tuple[range, ...]:
    shown = ",".join(map(str, explicit))
    if len(explicit) != stages:
        raise LayoutError(
            f"--layer-split {shown} names {len(explicit)} stages but --pipeline-parallel-size is {stages}", param="layer_split"
        )
    if min(explicit) < 1:
        raise LayoutError(f"--layer-split {shown}: each stage needs at least one layer", param="layer_split")
    if sum(explicit) != num_layers:
        raise LayoutError(
            f"--layer-split {shown} adds up to {sum(explicit)}; the model has {num_layers} layers", param="layer_split"
        )
    ends = [sum(explicit[: i + 1]) for i in range(stages)]
    if forbidden := uncut.intersection(ends):
        near = _nearest(num_layers, ends, uncut)
        remedy = f"nearest is --layer-split {','.join(map(str, near))}" if near else "use fewer stages"
        raise LayoutError(
            f"--layer-split {shown}: no stage can begin at layer {min(forbidden)}, since {_together(uncut)}; {remedy}",
            param="layer_split",
        )
    return tuple(range(end - count, end) for end, count in zip(ends, explicit, strict=True))


def _proportional(sizes: list[int], shares: list[int]) -> tuple[range, ...]:
    ranges: list[range] = []
    start, left, weight = 0, sum(sizes), sum(shares)
    for i, share in enumerate(shares):
        later = len(shares) - i - 1  # each later stage needs at least one layer
        stop = _cut(sizes, start, len(sizes) - later, left * share / weight) if later else len(sizes)
        ranges.append(range(start, stop))
        left -= sum(sizes[start:stop])
        weight -= share
        start = stop
    return tuple(ranges)


def _cut(sizes: list[int], start: int, limit: int, target: float) -> int:
    """Return the end of the range from `start` whose sum is closest to `target`; at least one layer, at most up to
    `limit`."""
    stop, total = start + 1, sizes[start]
    while stop < limit and abs(total + sizes[stop] - target) <= abs(total - target):
        total += sizes[stop]
        stop += 1
    return stop


def uncut(config: JsonMapping, num_layers: int) -> frozenset[int]:
    """Return the layers that must stay in the stage of the layer before them. `config` is that of the text model.

    Such layers reuse keys and values of an earlier one. Gemma 3n and 4: all layers after the first one that the last
    layers read from. Hunyuan: all but the first of each group. hy_v4 and glm5_next: layers after one with an index, up to
    the last that shares what it selected.
    """
    kind = config.get("model_type")
    shared = config.get("num_kv_shared_layers", _SHARED_BY_DEFAULT.get(str(kind), 0))
    if isinstance(shared, int) and 0 < shared < num_layers:
        first = num_layers - shared
        kinds = config.get("layer_types") or _gemma4_kinds(config, num_layers)
        sources = {kinds[i]: i for i in range(first)}
        return frozenset(range(min(sources[kind_of_layer] for kind_of_layer in set(kinds[first:])) + 1, num_layers))
    if kind in ("hy_v4", "glm5_next"):
        return _shared_indices(config, num_layers)
    if kind == "hunyuan" and config.get("use_cla"):
        return frozenset(i for i in range(num_layers) if i % int(config["cla_share_factor"]))
    return frozenset()


def _shared_indices(config: JsonMapping, num_layers: int) -> frozenset[int]:
    """Return the layers between one that selects positions by an index and the last that attends to the same."""
    kinds, linear = indexers(config, num_layers), config.get("layer_types") or []
    indexed = [i for i in range(num_layers) if linear[i : i + 1] != ["linear_attention"]]
    following = {i: next((kinds[one] for one in indexed if one >= i), "") for i in range(1, num_layers)}
    return frozenset(i for i, kind in following.items() if kind == "shared")


def indexers(config: JsonMapping, num_layers: int) -> list[str]:
    """Return for each layer of hy_v4 and glm5_next whether its index is `full`, its own, or `shared`.

    mlx-vlm's configs derive it where it is missing.
    """
    if kinds := config.get("indexer_types"):
        return list(kinds)
    if config.get("model_type") == "hy_v4":
        return ["full" if i < 2 or i % 4 == 1 else "shared" for i in range(num_layers)]
    if pattern := config.get("index_topk_pattern"):
        return [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    every, first = max(int(config.get("index_topk_freq", 1)), 1), int(config.get("index_skip_topk_offset", 2))
    return ["full" if max(i - first + 1, 0) % every == 0 else "shared" for i in range(num_layers)]


def _gemma4_kinds(config: JsonMapping, num_layers: int) -> list[str]:
    size = int(config.get("sliding_window_pattern", 5))
    return ["full" if (i + 1) % size == 0 else "sliding" for i in range(num_layers)]
