"""Memory of the machine or device that MLX computes on, and what a part of a model needs of it (mlx)."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import mlx.core as mx

from tandem.models.description import ModelDescription

CPU_CACHE_BYTES = 64 * 1024 * 1024
GPU_CACHE_BYTES = 2 * 1024 * 1024 * 1024


def limit_buffers() -> None:
    """Bound what MLX keeps of freed buffers: without a limit a rank's memory would follow its largest prompt."""
    mx.set_cache_limit(GPU_CACHE_BYTES if on_gpu() else CPU_CACHE_BYTES)


def on_gpu() -> bool:
    """True when MLX computes on a GPU here."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def slice_bytes(description: ModelDescription, layers: range, dtype: str, dequantize: bool, share: float) -> int:
    """Bytes in memory, estimated, of a rank's `share` of `layers`, with embedding and head at the ends.

    The embedding is not divided.
    """
    stored = sum(description.layer_bytes[i] for i in layers) * share
    stored += description.embed_bytes if layers.start == 0 else 0
    stored += description.head_bytes * share if layers.stop == description.num_layers else 0
    kind = dtype if dtype != "auto" else description.dtype if on_gpu() else "float32"
    item = 4 if kind == "float32" else 2
    if description.quantization:
        bits = description.quantization["bits"] + 32 / description.quantization["group_size"]
        return int(stored * (item * 8 / bits if dequantize else 1))
    return int(stored * item / (4 if description.dtype == "float32" else 2))


def memory_bytes() -> int:
    """Bytes of the memory that weights and KV live in."""
    if on_gpu():
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if key in info:
                return int(info[key])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
