"""Checks that may hang the GPU or use up its memory; only with `--risky`."""

from __future__ import annotations

import sys

from tandem.diagnostics.selftest.check import Differs, NotApplicable
from tandem.diagnostics.selftest.checks import hosts
from tandem.diagnostics.selftest.checks.fences import fence, sums
from tandem.diagnostics.selftest.server import serving
from tandem.diagnostics.tasks import Figures, Task
from tandem.errors import RankFailure
from tandem.processes.device import this_device
from tandem.system.metal import fault_of

START_S = 60.0
STEP = 2**30
MOST = 4
"""Multiple of the GPU's memory up to which the check allocates."""


def memory(task: Task) -> Figures:
    """Check that allocating more than the GPU has raises an exception that Tandem recognises, and leaves the device usable.
    Raises NotApplicable if `MOST` times its memory raises none."""
    import mlx.core as mx

    from tandem.loading.memory import choose_device, memory_bytes, on_gpu

    choose_device("auto")
    if not on_gpu():
        raise NotApplicable("a CPU's memory is the system's, which would end other programs first")
    arrays = []
    words = ""
    try:
        for _ in range(MOST * memory_bytes() // STEP):
            arrays.append(mx.ones((STEP // 4,)) * 1.0)
            mx.eval(arrays[-1])
    except Exception as error:  # noqa: BLE001 - class and message are the measurement
        words = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    figures: Figures = {"GiB before it": len(arrays), "exception": words or "none"}
    arrays.clear()
    mx.clear_cache()
    if words and fault_of(words) != "memory":
        raise Differs(f"words that are known for full memory, expected; {words}, seen", figures)
    if mx.ones(4).sum().item() != 4.0:
        raise Differs("a device that computes when memory is free again, expected; wrong sums, seen", figures)
    if not words:
        raise NotApplicable(f"the GPU took {MOST} times its memory without an exception")
    return figures


def fast_fences(task: Task) -> Figures:
    """Check sums of two ranks with MLX's fast fences, with a hosts file also tensor parallelism over its machines, and that the
    GPU still computes afterwards."""
    if sys.platform != "darwin" or not this_device().gpu:
        raise NotApplicable("fast fences are Metal's")
    figures: Figures = {}
    failure = ""
    try:
        figures = sums(fast_sync=True)
    except RankFailure as error:
        failure = error.message
    figures |= fence(task)
    if task.hostfile and not failure:
        figures |= hosts.fast_fences(task)
    with serving(task.model, start_s=START_S):
        pass
    if failure:
        raise Differs(f"sums with fast fences, expected; {failure}, seen", figures)
    return figures
