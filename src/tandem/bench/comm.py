"""Speed of what joins the ranks of this machine, and of its steps: ranks as children of this process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.doctor.messages import TIMING_MODULE, RankTimes, TimingTask
from tandem.doctor.session import tasks_of
from tandem.errors import RankFailure
from tandem.launchers.base import World
from tandem.launchers.local import LocalLauncher
from tandem.launchers.worlds import free_ports, make_world
from tandem.processes.child import ChildProcess

POLL_S = 0.05
HERE = "127.0.0.1"
OPERATIONS = ("all_sum", "between", "tcp", "ring")


def measure(backend: str, ranks: int, sizes: list[int], iterations: int, *, timeout_s: float, fast_sync: bool = False,
            operations: Sequence[str] = OPERATIONS) -> RankTimes:
    """What rank 0 finds, smallest sizes first.

    Operations: `all_sum` over all ranks, of an array that is there, and `between` two operations of the device; `tcp`
    and, where the backend is a ring, `ring`: one hop from a rank to the next, as pipeline stages hand over. Raises
    LayoutError for a backend that cannot be had here, RankFailure when a rank fails, a sum is wrong or `timeout_s`
    seconds pass.
    """
    world = make_world(backend, ranks, 0)
    try:
        task = TimingTask(backend=backend, operations=list(operations), sizes=sizes, iterations=iterations,
                          fast_sync=fast_sync)
        return _run(tasks_of(task, [HERE] * ranks, free_ports(ranks)), world, timeout_s)
    finally:
        world.remove()


def measure_here(timeout_s: float) -> RankTimes:
    """The steps of this machine, with all of its cores. Raises RankFailure."""
    return _run([TimingTask()], None, timeout_s)


def _run(group: Sequence[TimingTask], world: World | None, timeout_s: float) -> RankTimes:
    launcher = LocalLauncher(1 if world else None, TIMING_MODULE)
    processes: list[ChildProcess] = []
    with tempfile.TemporaryDirectory(prefix="tandem-comm-") as directory:
        results = [Path(directory) / f"found-{one.rank}.json" for one in group]
        try:
            for one in group:
                task = msgspec.structs.replace(one, result=str(results[one.rank]))
                processes.append(launcher.start(one.rank, len(group), msgspec.json.encode(task),
                                                world.variables(one.rank) if world else {}))
            return _found(processes, results, time.monotonic() + timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.wait(5.0)


def _found(processes: list[ChildProcess], results: list[Path], deadline: float) -> RankTimes:
    """Wait for all ranks; what the first has found. Raises RankFailure as soon as one has failed."""
    found: dict[int, RankTimes] = {}
    while len(found) < len(processes):
        for rank, process in enumerate(processes):
            if rank in found or (code := process.poll()) is None:
                continue
            if code:
                raise RankFailure(f"rank {rank} {process.describe_exit()}; what it says stands above", rank=rank)
            found[rank] = msgspec.json.decode(results[rank].read_bytes(), type=RankTimes)
            if found[rank].error:
                raise RankFailure(f"rank {rank}: {found[rank].error}", rank=rank)
        if time.monotonic() > deadline:
            late = [rank for rank in range(len(processes)) if rank not in found]
            raise RankFailure(f"ranks {late} have not ended in time (--timeout)")
        time.sleep(POLL_S)
    return found[0]
