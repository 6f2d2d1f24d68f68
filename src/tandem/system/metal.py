"""Metal's memory, fences and failures. Does not import mlx."""

from __future__ import annotations

import logging
import platform
import sys
from typing import Literal

from tandem.env import machine_memory, set_default, set_variables, variable
from tandem.system.tools import sysctl

GIB = 2**30
REFRESH = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"
REFRESH_MS = "1000"
FAST_FENCE = "MLX_METAL_FAST_SYNCH"
"""MLX's variable for faster fences, which can lock up a GPU until the machine restarts."""

FENCE_S, FAST_FENCE_S = 180e-6, 4e-6
"""Seconds per collective, beyond the link, that a Mac's GPU synchronisation takes: with MLX's default fences, and with
its fast ones (mlx#4438)."""
SHORT_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": 20, "MLX_MAX_MB_PER_BUFFER": 50}
"""Most operations, and most MiB, per Metal command buffer with fast fences; MLX's defaults are 20 to 50 operations.

A fence spins inside a command buffer, and macOS kills one that takes more than some seconds. Less work behind a fence lowers
that risk.
"""

log = logging.getLogger(__name__)

Fault = Literal["memory", "timeout"]
_MEMORY = (
    "ErrorOutOfMemory",
    "Insufficient Memory",
    "Unable to allocate",
    "Resource limit",
    "CUDA out of memory",
    "cudaErrorMemoryAllocation",
)
_TIMEOUT = ("CallbackErrorTimeout", "Caused GPU Timeout Error")


def gpu_memory(installed: int) -> int:
    """Return the bytes that Metal lets a GPU use by default of `installed` bytes: 2/3 up to 32 GiB, 3/4 above.

    Some macOS versions allow more (84 % of 128 GiB was reported), and `sysctl iogpu.wired_limit_mb` changes it. A machine's
    actual limit is `max_recommended_working_set_size` of `mlx.core.device_info()`.
    """
    return installed * 2 // 3 if installed <= 32 * GIB else installed * 3 // 4


def usable_memory() -> int:
    """Return the bytes of this machine's memory that ranks may use: on a Mac the GPU's limit, elsewhere all of it."""
    installed = machine_memory()
    if sys.platform != "darwin":
        return installed
    limit = sysctl("iogpu.wired_limit_mb")
    return int(limit) * 2**20 if limit.isdigit() and int(limit) else gpu_memory(installed)


def wires_memory() -> bool:
    """Return True where MLX can keep memory wired for the GPU: residency sets need macOS 15."""
    return int(platform.mac_ver()[0].partition(".")[0] or 0) >= 15


def prepare_metal(fast_fences: bool = False, sums: int = 0) -> None:
    """Set the variables that MLX's Metal backend reads at start-up. Call before mlx is imported.

    macOS unwires a GPU's memory after about a second without work, which delays the next answer. MLX can renew its wired
    memory at an interval. `fast_fences` overrides the environment. Off macOS only log a warning if `fast_fences` is set.
    `sums` is the number of sums over ranks per step, for the log; 0 for a rank that does not report them.
    """
    if sys.platform != "darwin":
        if fast_fences:
            log.warning("--fast-sync is about the GPUs of Macs; on this machine it has no effect")
        return
    set_default(REFRESH, REFRESH_MS)
    if fast_fences:
        set_variables({FAST_FENCE: "1", **{name: _at_most(name, most) for name, most in SHORT_BUFFERS.items()}})
        log.warning("MLX's fast fences are on (--fast-sync); should this Mac's GPU lock up, only a restart of the Mac frees it")
    elif (variable(FAST_FENCE) or "0") != "0":
        set_variables({FAST_FENCE: "0"})
        log.warning(
            "%s of the environment is not taken: it has locked GPUs up until the Mac was restarted; "
            "--fast-sync on is how to ask for it%s",
            FAST_FENCE,
            f", and would save {sums * (FENCE_S - FAST_FENCE_S) * 1e3:.1f} ms a token in {sums} sums over ranks" if sums else "",
        )


def _at_most(name: str, most: int) -> str:
    """Return the variable's value if the user has set a smaller number, else `most`."""
    own = variable(name) or ""
    return own if own.isdecimal() and 0 < int(own) < most else str(most)


def fault_of(text: str) -> Fault | None:
    """Classify the text of a GPU error: `memory` for exhausted memory, `timeout` for Metal's watchdog, else None.

    Metal kills a command buffer that takes more than some seconds. With tensor parallelism it may have waited for another
    rank all that time.
    """
    if any(sign in text for sign in _MEMORY):
        return "memory"
    return "timeout" if any(sign in text for sign in _TIMEOUT) else None
