"""Two ranks for a check, and their entry point: `python -m tandem.firstlight.ranks`. Each leaves what it found."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

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

MODULE = "tandem.firstlight.ranks"
RANKS = 2
SIDE = 512


class Errand(Struct, frozen=True, kw_only=True):
    """What a rank is to do."""

    rank: int
    result: str
    work: str
    """`late` or `wait`."""
    late_s: float = 0.0
    """Seconds that rank 1 comes late."""


class Found(Struct, frozen=True, kw_only=True):
    """What it found."""

    figures: Figures = {}
    error: str = ""
    """What MLX raised, with its class."""


class Pair:
    """The ranks, as processes that end with this one; a context manager."""

    def __init__(self, work: str, *, late_s: float = 0.0, ranks: int = RANKS) -> None:
        """Start so many of the `RANKS` ranks."""
        self._directory = tempfile.TemporaryDirectory(prefix="tandem-firstlight-")
        self._world = make_world("ring", RANKS, 0)
        self.processes: list[ChildProcess] = []
        launcher = LocalLauncher(1, MODULE)
        for rank in range(ranks):
            errand = Errand(rank=rank, result=str(self._result(rank)), work=work, late_s=late_s)
            self.processes.append(launcher.start(rank, RANKS, msgspec.json.encode(errand),
                                                 self._world.variables(rank)))

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
        work = {"late": lambda: _late(errand), "wait": _wait}[errand.work]
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
