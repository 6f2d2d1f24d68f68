"""Timing of one rank: collectives and channels or, for a single rank, the model steps of its machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from typing import TYPE_CHECKING

import msgspec

from tandem.bench.summary import percentile
from tandem.comm.blas import preload_blas
from tandem.diagnostics.tasks import RankTimes, Row, TimingTask
from tandem.errors import TandemError
from tandem.processes.child import guarded_lifeline
from tandem.system.cuda import prepare_cuda
from tandem.system.metal import prepare_metal
from tandem.transport.channel import FrameHeader, TcpChannel

if TYPE_CHECKING:
    import mlx.core as mx

    from tandem.comm.group import RingLink, StageGroup

WARM_UP = 5
ITEM_BYTES = 4
LEAST_S = 1e-7
"""Lower bound in seconds of a sum's time; shorter results are noise of a busy machine."""
CROSSINGS = 10
"""Device operations in a chain, each followed by a sum."""


class _Timer:
    """Records the times of repeated calls, without the warm-up calls."""

    def __init__(self, iterations: int) -> None:
        self._iterations = iterations
        self.rows: list[Row] = []

    def __call__(self, operation: str, size: int, act: Callable[[int], None], hops: int = 1) -> None:
        """Time `act(i)` for each iteration i; one call sends `hops` messages of `size` bytes one after the other."""
        self._note(operation, size, [spent / hops for spent in self._timed(act, self._iterations)])

    def between(self, size: int, chain: Callable[[bool], object]) -> None:
        """Time one sum of `size` bytes between two device operations.

        `chain(sums)` computes `CROSSINGS` operations, with a sum after each if `sums`. The difference is the sums' cost.
        """
        bare, times = list[float](), list[float]()
        for _ in range(max(self._iterations // CROSSINGS, 3)):  # interleaved, so that disturbances hit both alike
            bare += self._timed(lambda _: chain(False), 1, warm_up=1)
            times += self._timed(lambda _: chain(True), 1, warm_up=1)
        without = percentile(bare, 0.5)
        self._note("between", size, [max((spent - without) / CROSSINGS, LEAST_S) for spent in times])

    @staticmethod
    def _timed(act: Callable[[int], object], count: int, warm_up: int = WARM_UP) -> list[float]:
        times = []
        for i in range(warm_up + count):
            started = time.perf_counter()
            act(i)
            times.append(time.perf_counter() - started)
        return times[warm_up:]

    def _note(self, operation: str, size: int, times: list[float]) -> None:
        median, p99 = percentile(times, 0.5), percentile(times, 0.99)
        rate = size / median / 1e9
        self.rows.append(Row(operation=operation, bytes=size, median_us=1e6 * median, p99_us=1e6 * p99, gb_per_s=rate))


def time_rank(task: TimingTask) -> RankTimes:
    """Run the timing task; a failure is returned in `error`. Call before anything imports mlx."""
    prepare_metal(task.fast_sync)
    prepare_cuda()
    preload_blas("auto")
    try:
        return _measured(task)
    except (TandemError, RuntimeError, ValueError, OSError, ImportError) as error:
        return RankTimes(error=str(error))


def _measured(task: TimingTask) -> RankTimes:
    from tandem.loading.memory import choose_device, device_name, memory_bytes, on_gpu, on_metal

    choose_device("auto")
    times = RankTimes(device=device_name(), gpu=on_gpu(), metal=on_metal(), memory_bytes=memory_bytes(), mlx=version("mlx"))
    if task.ranks > 1:
        return msgspec.structs.replace(times, rows=_joined(task))
    from tandem.diagnostics.collectives.steps import measure_steps

    return msgspec.structs.replace(times, steps=measure_steps(gpu=on_gpu()))


def _joined(task: TimingTask) -> list[Row]:
    """Time collectives and hops between ranks. Raises TandemError for a wrong sum."""
    import mlx.core as mx

    from tandem.comm.group import RingLink, StageGroup

    timer = _Timer(task.iterations)
    with guarded_lifeline():
        group = StageGroup(task.backend, task.ranks)
    arrays = {size: mx.full((max(size // ITEM_BYTES, 1),), group.rank + 1.0) for size in task.sizes}
    mx.eval(*arrays.values())
    mean = (group.size + 1) / 2
    for size, array in arrays.items() if "all_sum" in task.operations else ():
        timer("all_sum", size, lambda _, array=array: mx.eval(group.sum(array)))  # type: ignore[misc]
        _check(group.sum(array), group.size * mean, f"a sum of {size} bytes over {group.size} ranks gives")
    for size, array in arrays.items() if "between" in task.operations else ():
        timer.between(size, lambda sums, array=array: mx.eval(_chain(group, array, sums)))  # type: ignore[misc]
        what = f"{CROSSINGS} sums of {size} bytes between operations give"
        _check(_chain(group, array, True), mean + CROSSINGS * group.size, what)
    if "tcp" in task.operations:
        assert task.keys is not None
        channel = TcpChannel(task.keys, *task.listen)
        channel.connect([task.following])
        for size in task.sizes:
            whole = max(size // ITEM_BYTES, 1) * ITEM_BYTES
            timer("tcp", whole, partial(_lap, channel, task.rank, whole), task.ranks)
    if "ring" in task.operations and task.backend == "ring":
        link = RingLink(task.ranks)
        for size, array in arrays.items():
            timer("ring", size, partial(_ring_lap, link, task.rank, array), task.ranks)
    mx.eval(group.sum(mx.zeros(1)))  # barrier: no rank closes its channel while a peer still reads from it
    if "tcp" in task.operations:
        channel.close()
    return timer.rows


def _chain(group: StageGroup, x: mx.array, sums: bool) -> mx.array:
    """Compute `CROSSINGS` dependent device operations, like layers, with a sum over the ranks after each if `sums`."""
    for _ in range(CROSSINGS):
        x = x * (1 / group.size) + 1.0
        if sums:
            x = group.sum(x)
    return x


def _check(total: mx.array, expected: float, what: str) -> None:
    """Raise TandemError unless all elements of `total` are close to `expected`."""
    import mlx.core as mx

    if not mx.allclose(total, mx.full(total.shape, expected)).item():
        raise TandemError(f"{what} {expected:g} everywhere, expected; others, seen")


def _ring_lap(link: RingLink, rank: int, array: mx.array, step: int) -> None:
    """Send an array once around MLX's ring."""
    if rank == 0:
        link.send(array, 0)
    received = link.receive(array.shape, array.dtype, 0)
    if rank != 0:
        link.send(received, 0)
    link.flush()


def _lap(channel: TcpChannel, rank: int, size: int, step: int) -> None:
    """Send `size` bytes once around the ring of TCP channels."""
    header = FrameHeader(step, "float32", (size // ITEM_BYTES,))
    if rank == 0:
        channel.send(header, bytes(size))
    data = channel.receive(header)
    if rank != 0:
        channel.send(header, data)
