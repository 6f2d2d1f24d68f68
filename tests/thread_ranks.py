"""Tensor parallelism among threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import mlx.core as mx

T = TypeVar("T")


class ThreadGroup:
    """Ranks of one stage as threads of this process: `run` gives each its `ThreadRank`, a TensorParallel.

    `calls` lists what rank 0 asked for, as (name, shape of the result).
    """

    def __init__(self, size: int, *, timeout_s: float = 120.0) -> None:
        """`timeout_s` is how long a rank waits for the others in one call."""
        self.size = size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._slots: list[Any] = [None] * size
        self._barrier = threading.Barrier(size, timeout=timeout_s)

    def run(self, work: Callable[[ThreadRank], T]) -> list[T]:
        """Call `work` once for each rank, all at the same time; results in the order of ranks.

        Arrays in the results must be evaluated: MLX's streams belong to threads. A failing rank ends the others.
        """
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(self._guarded, work, rank) for rank in range(self.size)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return [future.result() for future in futures]

    def _guarded(self, work: Callable[[ThreadRank], T], rank: int) -> T:
        try:
            return work(ThreadRank(self, rank))
        except BaseException:
            self._barrier.abort()
            raise

    def exchange(self, rank: int, array: Any) -> list[Any]:
        """All ranks' evaluated arrays."""
        mx.eval(array)
        self._slots[rank] = array
        self._barrier.wait()
        arrays = list(self._slots)
        self._barrier.wait()  # nobody overwrites a slot before all have read
        return arrays


class ThreadRank:
    """One rank of a `ThreadGroup`. Used by its thread alone. Raises ValueError where the ranks' arrays do not fit."""

    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self.rank = rank
        self.size = group.size
        self._group = group

    def sum(self, x: Any) -> Any:
        """Elementwise sum over the ranks, in their order."""
        arrays = self._group.exchange(self.rank, x)
        if len({(a.shape, a.dtype) for a in arrays}) > 1:
            raise ValueError(f"ranks sum different arrays: {[(a.shape, a.dtype) for a in arrays]}")
        total = arrays[0]
        for array in arrays[1:]:
            total = total + array
        return self._record("sum", total)

    def gather_last(self, x: Any, sizes: Sequence[int]) -> Any:
        """All ranks' last axes, `sizes[r]` long on rank r."""
        arrays = self._group.exchange(self.rank, x)
        if [a.shape[-1] for a in arrays] != list(sizes):
            raise ValueError(f"ranks gather {[a.shape for a in arrays]}, announced were {list(sizes)}")
        return self._record("gather_last", mx.concatenate(arrays, axis=-1))

    def _record(self, name: str, result: Any) -> Any:
        if self.rank == 0:
            self._group.calls.append((name, tuple(result.shape)))
        return result
