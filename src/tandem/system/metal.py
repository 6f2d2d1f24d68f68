"""Metal's memory, fences and failures. Without mlx."""

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
"""MLX's variable for fences that are faster, and that can lock a GPU up until the machine is restarted."""

SHORT_BUFFERS = {"MLX_MAX_OPS_PER_BUFFER": 20, "MLX_MAX_MB_PER_BUFFER": 50}
"""With fast fences, the most operations and MiB of one of Metal's command buffers. A fence spins inside of one, and
macOS ends what takes more than some seconds: the less work stands behind it the better. MLX's own are 20 to 50."""

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


def wires_memory() -> bool:
    """True where MLX can keep memory with the GPU: residency sets came with macOS 15."""
    return int(platform.mac_ver()[0].partition(".")[0] or 0) >= 15


def prepare_metal(fast_fences: bool = False) -> None:
    """Set what Metal's backend reads when it starts. Call before mlx is imported; off macOS it only says so if
    `fast_fences` are wanted.

    macOS takes a GPU's memory away after about a second without work, and the next answer is late. MLX can ask for it
    anew at an interval; it does so for what is wired. Fences are as `fast_fences` says, whatever the environment does.
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
            "--fast-sync on is how to ask for it",
            FAST_FENCE,
        )


def _at_most(name: str, most: int) -> str:
    """A variable's number if the user has set a smaller one, else `most`."""
    own = variable(name) or ""
    return own if own.isdecimal() and 0 < int(own) < most else str(most)


def fault_of(text: str) -> Fault | None:
    """Return what a GPU's error means, from its words: memory was full, or a wait was longer than the system allows.

    Metal ends a command buffer that takes more than some seconds; with tensor parallelism it may have waited for
    another rank all that time.
    """
    if any(sign in text for sign in _MEMORY):
        return "memory"
    return "timeout" if any(sign in text for sign in _TIMEOUT) else None
