"""Which stage holds which layers. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.errors import LayoutError


def split_layers(
    num_layers: int,
    stages: int,
    *,
    layer_bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    explicit: Sequence[int] | None = None,
) -> tuple[range, ...]:
    """Contiguous ranges, one for each stage, each layer exactly once and no stage empty.

    `explicit` (layers per stage) wins. Otherwise shares of `layer_bytes` (by default all layers alike) follow
    `memory`, the bytes that each stage has for weights (by default all stages alike). Cuts are placed one after the
    other where the running sum is nearest to the target. Raises `LayoutError` naming the flag to change.
    """
    if stages < 1:
        raise LayoutError(f"--pipeline-parallel-size must be at least 1, is {stages}", param="pipeline_parallel_size")
    if explicit is not None:
        return _explicit(num_layers, stages, explicit)
    if stages > num_layers:
        raise LayoutError(
            f"--pipeline-parallel-size {stages} is more than the model's {num_layers} layers",
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
        raise LayoutError(
            f"stage {stage} has no memory for weights; give --layer-split or fewer stages", param="layer_split"
        )
    return _proportional(sizes, shares)


def _explicit(num_layers: int, stages: int, explicit: Sequence[int]) -> tuple[range, ...]:
    shown = ",".join(map(str, explicit))
    if len(explicit) != stages:
        raise LayoutError(
            f"--layer-split {shown} names {len(explicit)} stages but --pipeline-parallel-size is {stages}",
            param="layer_split",
        )
    if min(explicit) < 1:
        raise LayoutError(f"--layer-split {shown}: each stage needs at least one layer", param="layer_split")
    if sum(explicit) != num_layers:
        raise LayoutError(
            f"--layer-split {shown} adds up to {sum(explicit)}; the model has {num_layers} layers", param="layer_split"
        )
    ends = [sum(explicit[: i + 1]) for i in range(stages)]
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
    """End of the range that starts at `start`, has one layer or more, ends by `limit` and sums up closest to target."""
    stop, total = start + 1, sizes[start]
    while stop < limit and abs(total + sizes[stop] - target) <= abs(total - target):
        total += sizes[stop]
        stop += 1
    return stop
