"""Does this machine's GPU answer? Asked by every new rank before it loads.

A GPU that was locked up (fast fences, a driver's fault) takes work and never ends it, and nothing but a restart of the
machine frees it. Without this question each new rank group would wait for such a one until `start_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Timer

from tandem.errors import GpuSilent
from tandem.loading.memory import on_gpu, small_product
from tandem.system.metal import fault_of

PROBE_S = 20.0
"""Seconds that a GPU gets for what takes milliseconds: a kernel that is used for the first time is compiled first, and
other processes may be at work."""
REMEDY = "restart that machine, nothing else frees a GPU that is locked up (and leave --fast-sync off if it was on)"


def probe_gpu(tell: Callable[[Exception], None]) -> None:
    """Have the GPU compute a little; returns at once where the CPU computes. In the thread that owns MLX.

    `tell` gets a `GpuSilent`, from another thread, if the answer takes too long: this call may then never return.
    Raises `GpuSilent` for a GPU that refuses.
    """
    if not on_gpu():
        return
    alarm = Timer(
        PROBE_S,
        lambda: tell(
            GpuSilent(f"its GPU does not answer: a small product was not done after {PROBE_S:.0f} s; {REMEDY}", cause="gpu")
        ),
    )
    alarm.daemon = True
    alarm.start()
    try:
        small_product()
    except RuntimeError as error:
        if fault_of(str(error)) == "memory":
            raise
        raise GpuSilent(f"its GPU refuses a small product ({error}); {REMEDY}", cause="gpu") from error
    finally:
        alarm.cancel()
