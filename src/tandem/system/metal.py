"""What is special about Metal's memory, and about how it fails. Without mlx."""

from __future__ import annotations

import sys
from typing import Literal

from tandem.env import machine_memory, set_default
from tandem.system.tools import sysctl

GIB = 2**30
REFRESH = "MLX_METAL_RESIDENCY_REFRESH_INTERVAL_MS"
REFRESH_MS = "1000"
FAST_FENCE = "MLX_METAL_FAST_SYNCH"
"""MLX's variable for fences that are faster, and that can lock a GPU up until the machine is restarted."""

Fault = Literal["memory", "timeout"]
_MEMORY = ("ErrorOutOfMemory", "Insufficient Memory", "Unable to allocate", "Resource limit", "CUDA out of memory",
           "cudaErrorMemoryAllocation")
_TIMEOUT = ("CallbackErrorTimeout", "Caused GPU Timeout Error")


def gpu_memory(installed: int) -> int:
    """Bytes that Metal lets a GPU use by default of `installed` bytes: 2/3 up to 32 GiB, 3/4 above.

    Some macOS versions allow more (84 % of 128 GiB was reported), and `sysctl iogpu.wired_limit_mb` changes it: a
    machine's own figure is `max_recommended_working_set_size` of `mlx.core.device_info()`.
    """
    return installed * 2 // 3 if installed <= 32 * GIB else installed * 3 // 4


def usable_memory() -> int:
    """Bytes of this machine that ranks may use: on a Mac what Metal lets its GPU have, elsewhere all there is."""
    installed = machine_memory()
    if sys.platform != "darwin":
        return installed
    limit = sysctl("iogpu.wired_limit_mb")
    return int(limit) * 2**20 if limit.isdigit() and int(limit) else gpu_memory(installed)


def prepare_metal() -> None:
    """Set what Metal's backend reads when it starts. Call before mlx is imported; does nothing off macOS.

    macOS takes a GPU's memory away after about a second without work, and the next answer is late. MLX can ask for it
    anew at an interval; it does so for what is wired.
    """
    if sys.platform == "darwin":
        set_default(REFRESH, REFRESH_MS)


def fault_of(text: str) -> Fault | None:
    """What a GPU's error means, from its words: its memory was full, or it waited longer than the system allows.

    Metal ends a command buffer that takes more than some seconds; with tensor parallelism it may have waited for
    another rank all that time.
    """
    if any(sign in text for sign in _MEMORY):
        return "memory"
    return "timeout" if any(sign in text for sign in _TIMEOUT) else None
