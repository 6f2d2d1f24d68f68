"""Memory of the machine or device that MLX computes on (mlx)."""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import mlx.core as mx

from tandem.env import machine_memory

CPU_CACHE_BYTES = 64 * 1024 * 1024
GPU_CACHE_BYTES = 2 * 1024 * 1024 * 1024


def limit_buffers() -> None:
    """Bound what MLX keeps of freed buffers: without a limit a rank's memory would follow its largest prompt."""
    mx.set_cache_limit(GPU_CACHE_BYTES if on_gpu() else CPU_CACHE_BYTES)


def on_gpu() -> bool:
    """True when MLX computes on a GPU here."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def memory_bytes() -> int:
    """Bytes of the memory that weights and KV live in."""
    if on_gpu():
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if key in info:
                return int(info[key])
    return machine_memory()


def peak_bytes() -> int:
    """Most memory that this process has used: on the device if there is one, else resident."""
    if on_gpu():
        return int(mx.get_peak_memory())
    if sys.platform == "linux":
        # Not getrusage: its maximum is inherited from the parent process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
