"""GPU probe: every new rank checks before loading that its GPU answers.

A locked-up GPU (fast fences, a driver fault) accepts work and never finishes it until the machine restarts. Without the probe
each new rank group would wait until `start_timeout`.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Timer

from tandem.errors import GpuSilent
from tandem.loading.memory import on_gpu, small_product
from tandem.system.metal import fault_of

PROBE_S = 20.0
"""Timeout in seconds for work of milliseconds: the kernel may need compiling, and other processes may be busy."""
REMEDY = "restart that machine, nothing else frees a GPU that is locked up (and leave --fast-sync off if it was on)"


def probe_gpu(tell: Callable[[Exception], None]) -> None:
    """Run a small product on the GPU; return at once if the rank computes on the CPU. Call in the thread that owns MLX.

    On timeout `tell` is called with `GpuSilent` from another thread, and this call may never return. Raises `GpuSilent` if
    the GPU reports an error, RuntimeError if its memory is full.
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
