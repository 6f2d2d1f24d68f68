"""Checks of synchronisation: between streams, between ranks, and with a rank that is late."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tandem.diagnostics.collectives.measure import measure
from tandem.diagnostics.selftest.check import Differs, judged
from tandem.diagnostics.tasks import Figures, Task, TaskProcess, check_parts, local_group
from tandem.errors import TandemError
from tandem.processes.child import guarded_lifeline
from tandem.system.cuda import prepare_cuda
from tandem.system.metal import fault_of

CROSSINGS = 101
PAIR_S = 60.0
RANKS = 2
SIDE = 512
SIZES = (4096, 65_536, 1 << 20, 16 << 20)
"""Array sizes in bytes."""
ROUNDS = 10
LATE = (2.0, 4.0, 6.0, 8.0) if sys.platform == "darwin" else (1.0,)
"""Delays to try, in seconds. Metal aborts work that waits for some seconds; other backends do not."""


def fence(task: Task) -> Figures:
    """Check work that alternates between a GPU and a CPU stream, or two CPU streams; report microseconds per crossing."""
    import mlx.core as mx

    from tandem.loading.memory import choose_device

    choose_device("auto")
    there, back = mx.default_stream(mx.default_device()), mx.new_stream(mx.cpu)

    def crossed() -> float:
        x = mx.zeros((16,))
        mx.eval(x)
        began = time.perf_counter()
        for i in range(CROSSINGS):
            x = mx.add(x, 1.0, stream=back if i % 2 else there)
        mx.eval(x)
        spent = time.perf_counter() - began
        if (seen := x.tolist()) != [float(CROSSINGS)] * 16:
            raise Differs(f"{CROSSINGS} crossings count to {CROSSINGS}, expected; {seen}, seen")
        return spent

    crossed()
    return {"us a crossing": round(1e6 * min(crossed() for _ in range(5)) / CROSSINGS, 1)}


def collectives(task: Task) -> Figures:
    """Check sums of two local ranks, alone and between device operations."""
    return sums(fast_sync=False)


def sums(*, fast_sync: bool) -> Figures:
    """Return the time of a sum by size, and of a sum between two device operations. Raises RankFailure, also for wrong sums."""
    times = measure("ring", RANKS, list(SIZES), ROUNDS, timeout_s=PAIR_S, fast_sync=fast_sync, operations=("all_sum", "between"))
    figures: Figures = {
        f"all_sum of {row.bytes >> 10} KiB, us": round(row.median_us, 1) for row in times.rows if row.operation == "all_sum"
    }
    between = next(row for row in times.rows if row.operation == "between")
    return figures | {"a sum between two operations, us": round(between.median_us, 1)}


@contextmanager
def ring_ranks(entry: str, *, count: int = RANKS, late_s: float = 0.0) -> Iterator[list[TaskProcess]]:
    """Start `count` of a ring's `RANKS` ranks as processes that run `entry`; killed when the context ends."""
    options: list[dict[str, object]] = [{"late_s": late_s if rank else 0.0} for rank in range(count)]
    with local_group("ring", RANKS) as variables, check_parts(entry, options, variables[:count]) as ranks:
        yield ranks


def late(task: Task) -> Figures:
    """Check that a rank whose peer is late to a sum waits, or gets an error that Tandem recognises as a timeout."""
    figures: Figures = {}
    problems = []
    for seconds in LATE:
        with ring_ranks("fences:late_rank", late_s=seconds) as (first, _):
            finding = first.finding(seconds + PAIR_S)
        waited = finding.figures.get("seconds")
        figures[f"{seconds:g} s late"] = finding.detail or f"waited {waited} s"
        if finding.detail and (finding.verdict == "no answer" or fault_of(finding.detail) != "timeout"):
            problems.append(
                f"{seconds:g} s late: an answer, or an error that is known for a wait, expected; {finding.detail}, seen"
            )
        elif not finding.detail and isinstance(waited, float) and waited < 0.5 * seconds:
            problems.append(f"{seconds:g} s late: a sum after as long, expected; after {waited} s, seen")
    return judged(problems, figures)


def late_rank(task: Task) -> Figures:
    """Join a ring, wait `late_s` seconds after a first sum, and time a second sum between matrix products."""
    prepare_cuda()
    import mlx.core as mx

    from tandem.loading.memory import choose_device

    choose_device("auto")
    group = mx.distributed.init(backend="ring", strict=True)
    matrix = mx.eye(SIDE)
    mx.eval(mx.distributed.all_sum(mx.ones((1, SIDE)) @ matrix, group=group))
    time.sleep(task.options["late_s"])
    began = time.perf_counter()
    total = (mx.distributed.all_sum(mx.ones((1, SIDE)) @ matrix, group=group) @ matrix).sum().item()
    if total != RANKS * SIDE:
        raise TandemError(f"a late sum of {RANKS * SIDE}, expected; {total}, seen")
    return {"seconds": round(time.perf_counter() - began, 2)}


def waiting_rank(task: Task) -> Figures:
    """Join a ring whose other rank never joins; run as a process of its own."""
    prepare_cuda()
    import mlx.core as mx

    with guarded_lifeline():
        mx.distributed.init(backend="ring", strict=True)
    return {}
