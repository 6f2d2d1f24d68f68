"""Two ranks for a check, and their entry point: `python -m tandem.firstlight.ranks`. Each leaves what it found."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from tandem.borders import own_process
from tandem.comm.blas import preload_blas
from tandem.errors import TandemError
from tandem.firstlight.check import Figures
from tandem.launchers.local import LocalLauncher
from tandem.launchers.worlds import make_world
from tandem.processes.child import ChildProcess, guarded_lifeline, receive_payload, watch_lifeline
from tandem.system.cuda import prepare_cuda

if TYPE_CHECKING:
    import mlx.core as mx

MODULE = "tandem.firstlight.ranks"
RANKS = 2
SIZES = (4096, 65_536, 1 << 20, 16 << 20)
"""Bytes."""
ROUNDS = 10
CROSSINGS = 40
SIDE = 512


class Errand(Struct, frozen=True, kw_only=True):
    """What a rank is to do."""

    rank: int
    result: str
    work: str
    """`between`, `late` or `wait`."""
    late_s: float = 0.0
    """Seconds that rank 1 comes late."""


class Found(Struct, frozen=True, kw_only=True):
    """What it found."""

    figures: Figures = {}
    error: str = ""
    """What MLX raised, with its class."""


class Pair:
    """The ranks, as processes that end with this one; a context manager."""

    def __init__(self, work: str, *, late_s: float = 0.0, ranks: int = RANKS,
                 variables: Mapping[str, str] | None = None) -> None:
        """Start so many of the `RANKS` ranks."""
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-firstlight-")
        self._world = make_world("ring", RANKS, 0)
        self.processes: list[ChildProcess] = []
        launcher = LocalLauncher(1, MODULE)
        for rank in range(ranks):
            errand = Errand(rank=rank, result=str(self._result(rank)), work=work, late_s=late_s)
            environment = {**self._world.variables(rank), **(variables or {})}
            self.processes.append(launcher.start(rank, RANKS, msgspec.json.encode(errand), environment))

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait(10.0)
        self._world.remove()
        self._directory.cleanup()

    def found(self, seconds: float) -> list[Found]:
        """What the ranks found. One that died, or has not ended in time, has that for an error."""
        deadline = time.monotonic() + seconds
        found = []
        for rank, process in enumerate(self.processes):
            ended = process.wait(max(deadline - time.monotonic(), 0.0))
            try:
                found.append(msgspec.json.decode(self._result(rank).read_bytes(), type=Found))
            except FileNotFoundError:
                found.append(Found(error=f"rank {rank} {process.describe_exit()}" if ended
                                   else f"rank {rank} did not come back within {seconds:g} s"))
        return found

    def _result(self, rank: int) -> Path:
        return Path(self._directory.name) / f"rank-{rank}.json"


def _between() -> Figures:
    """Sums alone, by size, and what one costs between two products on the device, as a layer has it."""
    import mlx.core as mx

    group = mx.distributed.init(backend="ring", strict=True)
    figures: Figures = {}
    for size in SIZES:
        array = mx.full((size // 4,), float(group.rank() + 1))
        mx.eval(array)
        figures[f"all_sum of {size >> 10} KiB, us"] = round(1e6 * _best(
            lambda array=array: mx.distributed.all_sum(array, group=group), size), 1)  # type: ignore[misc]
    matrix = mx.eye(SIDE)

    def chain(sums: bool) -> mx.array:
        x = mx.ones((1, SIDE))
        for _ in range(CROSSINGS):
            x = x @ matrix
            if sums:
                x = mx.distributed.all_sum(x, group=group) * (1 / RANKS)
        return x

    mx.eval(chain(True), chain(False))
    with_sums = min(_timed(lambda: mx.eval(chain(True))) for _ in range(3))
    without = min(_timed(lambda: mx.eval(chain(False))) for _ in range(3))
    total = chain(True).sum().item()
    if total != SIDE:
        raise TandemError(f"{CROSSINGS} sums between products give {SIDE}, expected; {total}, seen")
    figures["a sum between two products, us"] = round(1e6 * (with_sums - without) / CROSSINGS, 1)
    return figures


def _best(work: Callable[[], mx.array], size: int) -> float:
    """Seconds of the fastest of some sums, whose result is checked."""
    import mlx.core as mx

    best, total = float("inf"), work()
    for _ in range(ROUNDS):
        began = time.perf_counter()
        total = work()
        mx.eval(total)
        best = min(best, time.perf_counter() - began)
    expected = RANKS * (RANKS + 1) / 2
    if not mx.array_equal(total, mx.full(total.shape, expected)).item():
        raise TandemError(f"a sum of {size} bytes over {RANKS} ranks gives {expected:g} everywhere, expected; others, "
                          "seen")
    return best


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _late(errand: Errand) -> Figures:
    """One rank comes late to a sum between products; how long the other waits."""
    import mlx.core as mx

    group = mx.distributed.init(backend="ring", strict=True)
    matrix = mx.eye(SIDE)
    mx.eval(mx.distributed.all_sum(mx.ones((1, SIDE)) @ matrix, group=group))
    if errand.rank == 1:
        time.sleep(errand.late_s)
    began = time.perf_counter()
    total = (mx.distributed.all_sum(mx.ones((1, SIDE)) @ matrix, group=group) @ matrix).sum().item()
    if total != RANKS * SIDE:
        raise TandemError(f"a late sum of {RANKS * SIDE}, expected; {total}, seen")
    return {"seconds": round(time.perf_counter() - began, 2)}


def _wait() -> Figures:
    """Join a group whose other rank never comes."""
    import mlx.core as mx

    with guarded_lifeline():
        mx.distributed.init(backend="ring", strict=True)
    return {}


def main() -> None:
    """Run an errand, and leave what came of it."""
    own_process()
    errand = msgspec.json.decode(receive_payload(), type=Errand)
    watch_lifeline()
    prepare_cuda()
    preload_blas("auto")
    if errand.work != "wait":
        from tandem.loading.memory import choose_device

        choose_device("auto")
    try:
        work = {"between": _between, "late": lambda: _late(errand), "wait": _wait}[errand.work]
        found = Found(figures=work())
    except Exception as error:  # noqa: BLE001 - what MLX raises, and how, is what we want to know
        found = Found(error=f"{type(error).__name__}: {error}")
    part = Path(errand.result + ".part")
    part.write_bytes(msgspec.json.encode(found))
    part.replace(errand.result)
    sys.stdout.flush()
    os._exit(0)  # MLX's ring waits for its peers when it is taken down


if __name__ == "__main__":
    main()
