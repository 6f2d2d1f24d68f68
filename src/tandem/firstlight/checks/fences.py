"""What it costs to wait for one another: streams, ranks between a GPU's operations, and a rank that is late."""

from __future__ import annotations

import sys
import time

from tandem.bench.comm import measure
from tandem.firstlight.check import Differs, Figures, Task
from tandem.firstlight.ranks import Pair
from tandem.system.metal import fault_of

CROSSINGS = 101
PAIR_S = 60.0
SIZES = (4096, 65_536, 1 << 20, 16 << 20)
"""Bytes."""
ROUNDS = 10
LATE = (2.0, 4.0, 6.0, 8.0) if sys.platform == "darwin" else (1.0,)
"""Seconds. Metal ends what waits for some seconds; elsewhere nothing does."""


def fence(task: Task) -> Figures:
    """Work goes to and fro between the CPU's and the GPU's stream, or between two of the CPU."""
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
    """Sums of two ranks on this machine, alone and between the device's operations."""
    return sums(fast_sync=False)


def sums(*, fast_sync: bool) -> Figures:
    """Sums alone, by size, and what one costs between two operations. Raises RankFailure, also for wrong sums."""
    found = measure("ring", 2, list(SIZES), ROUNDS, timeout_s=PAIR_S, fast_sync=fast_sync,
                    operations=("all_sum", "between"))
    figures: Figures = {f"all_sum of {row.bytes >> 10} KiB, us": round(row.median_us, 1)
                        for row in found.rows if row.operation == "all_sum"}
    between = next(row for row in found.rows if row.operation == "between")
    return figures | {"a sum between two operations, us": round(between.median_us, 1)}


def late(task: Task) -> Figures:
    """What a rank meets whose peer comes late to a sum: it waits, or gets an error that Tandem knows for what it is."""
    figures: Figures = {}
    problems = []
    for seconds in LATE:
        with Pair("late", late_s=seconds) as pair:
            first = pair.found(seconds + PAIR_S)[0]
        waited = first.figures.get("seconds")
        figures[f"{seconds:g} s late"] = f"waited {waited} s" if not first.error else first.error.splitlines()[0]
        if first.error and fault_of(first.error) != "timeout":
            problems.append(f"{seconds:g} s late: an answer, or an error that is known for a wait, expected; "
                            f"{first.error.splitlines()[0]}, seen")
        elif not first.error and isinstance(waited, float) and waited < 0.5 * seconds:
            problems.append(f"{seconds:g} s late: a sum after as long, expected; after {waited} s, seen")
    if problems:
        raise Differs("; ".join(problems), figures)
    return figures
