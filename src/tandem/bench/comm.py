"""Speed of what joins the ranks of this machine, and of its steps: ranks as children of this process."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.doctor.messages import LATE, RankTimes, TimingTask
from tandem.doctor.ranks import run_ranks, tasks_of
from tandem.errors import RankFailure
from tandem.launchers.base import World
from tandem.launchers.local import LocalLauncher
from tandem.launchers.worlds import free_ports, make_world

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


def _run(tasks: Sequence[TimingTask], world: World | None, timeout_s: float) -> RankTimes:
    launcher = LocalLauncher(1 if world else None)
    variables = [{**launcher.variables(task.rank, len(tasks)), **(world.variables(task.rank) if world else {})}
                 for task in tasks]
    found = run_ranks(tasks, variables, timeout_s)
    for rank, one in enumerate(found):
        if one.error not in (None, LATE):
            raise RankFailure(f"rank {rank}: {one.error}", rank=rank)
    if late := [rank for rank, one in enumerate(found) if one.error]:
        raise RankFailure(f"ranks {late} have not ended in time (--timeout)")
    return found[0]
