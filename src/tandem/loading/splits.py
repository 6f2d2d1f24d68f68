"""The seam for `mx.split` on NVIDIA GPUs, where its parts do not tell how much memory they span (mlx).

A part counts its elements alone, though those of other parts lie between them. MLX's rotary kernel for CUDA takes
memory for its result by that count and writes with the part's gaps, so beyond it: into what other arrays hold. Models
with latent attention rotate such parts in every layer (https://github.com/ml-explore/mlx/pull/4540). Slices count it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import mlx.core as mx


def split_by_slices() -> None:
    """Let `mx.split` and the arrays' method give slices. For the whole process; idempotent."""
    owners: tuple[Any, ...] = (mx, mx.array)
    for owner in owners:
        theirs = owner.split
        if not hasattr(theirs, "__wrapped__"):
            owner.split = _sliced(theirs)


def _sliced(theirs: Callable[..., list[mx.array]]) -> Callable[..., list[mx.array]]:
    @functools.wraps(theirs)
    def split(a: mx.array, indices_or_sections: int | list[int], axis: int = 0, **others: Any) -> list[mx.array]:
        if others or not -a.ndim <= axis < a.ndim:
            return theirs(a, indices_or_sections, axis, **others)
        length, ends = a.shape[axis], indices_or_sections
        if isinstance(ends, int):
            if ends < 1 or length % ends:
                return theirs(a, ends, axis)
            ends = [length // ends * number for number in range(1, ends)]
        before = (slice(None),) * (axis % a.ndim)
        return [a[(*before, slice(start, stop))] for start, stop in pairwise((0, *ends, length))]

    return split
