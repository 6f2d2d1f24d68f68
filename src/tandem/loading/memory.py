"""Memory of the machine or device that MLX computes on (mlx)."""

from __future__ import annotations

import logging
import resource
import sys
from pathlib import Path

import mlx.core as mx

from tandem.env import machine_memory, variable
from tandem.errors import ConfigError

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 64 * 1024 * 1024
GPU_CACHE_BYTES = 2 * 1024 * 1024 * 1024
CACHE_PART = 16
"""The buffers that the ranks of a machine keep may take this part of a small GPU's memory."""
HEADROOM = 0.15
"""Share of a GPU's memory that its ranks may have for what lasts a moment, beside what `memory_share` gives."""
CUDA_SHARE = 0.95
"""Part of an NVIDIA GPU's memory that its ranks may take together; the rest is CUDA's own."""
SYSTEM_BYTES, SYSTEM_PART = 8 * 1024 * 1024 * 1024, 4
"""Memory of a Mac that is never wired: this many bytes, or a fourth of it if that is more."""


def choose_device(device: str) -> None:
    """Set MLX's device: `cpu`, `gpu`, or with `auto` TANDEM_DEVICE, else MLX's default.

    For the whole process. Raises ConfigError.
    """
    if device == "auto":
        device = variable("TANDEM_DEVICE") or "auto"
    if device not in ("auto", "cpu", "gpu"):
        raise ConfigError(f"TANDEM_DEVICE: {device!r} is not one of auto, cpu, gpu", param="device")
    if device == "gpu" and not mx.is_available(mx.gpu):
        raise ConfigError(
            "--device gpu: MLX has no GPU on this machine; give auto or cpu, or install MLX with a GPU "
            "backend (scripts/setup --backend cuda13)",
            param="device",
        )
    if device != "auto":
        mx.set_default_device(mx.gpu if device == "gpu" else mx.cpu)


def cache_bytes(sharing: int) -> int:
    """Most bytes of freed buffers that each of `sharing` ranks on a machine keeps."""
    return min(GPU_CACHE_BYTES, memory_bytes() // CACHE_PART) // sharing if on_gpu() else CPU_CACHE_BYTES


def limit_memory(share: float, sharing: int) -> None:
    """Bound what MLX takes: without a limit its buffers would follow the largest prompt.

    `share` is the part of the memory that this rank's weights and KV may take; it is one of `sharing` on the machine.
    On Metal each process would else believe that all of the memory, and half of it again, is its own. What a GPU has
    been given to do and has not done holds its memory, layers and tokens ahead; at the limit MLX waits for it.
    """
    mx.set_cache_limit(cache_bytes(sharing))
    if on_gpu():
        whole = 1.0 if on_metal() else CUDA_SHARE
        mx.set_memory_limit(int(memory_bytes() * min(whole / sharing, share + HEADROOM / sharing)))


def wire_weights(wanted: int | None, share: float) -> int:
    """Keep loaded weights resident in a Mac's GPU memory while idle. Returns the bytes; 0 off Metal.

    Call with the weights loaded, nothing else, and no step under way. macOS gives memory that is not wired to others
    after a second, and a model that nearly fills a Mac then crawls. Only the weights are wired: a wired set that KV
    and temporaries enter and leave has made macOS panic. `wanted` is the user's limit in bytes; 0 wires nothing.
    """
    if wanted == 0 or not on_metal():
        return 0
    mx.clear_cache()
    loaded, installed = mx.get_active_memory(), machine_memory()
    most = int(share * min(memory_bytes(), max(installed - max(SYSTEM_BYTES, installed // SYSTEM_PART), 0)))
    size = min(loaded, most, loaded if wanted is None else wanted)
    mx.set_wired_limit(size)
    log.info("wired %d of %d MiB of weights", size >> 20, loaded >> 20)
    return size


def on_gpu() -> bool:
    """True when MLX computes on a GPU here."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def on_metal() -> bool:
    """True when that is a Mac's."""
    return on_gpu() and mx.metal.is_available()


def on_cuda() -> bool:
    """True when that is NVIDIA's."""
    return on_gpu() and mx.cuda.is_available()


def small_product() -> None:
    """Have the device multiply two small matrices, and wait for it. Raises RuntimeError where it cannot."""
    ones = mx.ones((64, 64))
    mx.eval(ones @ ones)


def device_name() -> str:
    """Device of MLX, for the log: the GPU's name and, where CUDA was given some, their numbers."""
    if not on_gpu():
        return "the CPU"
    name = str(mx.device_info().get("device_name", "a GPU"))
    chosen = variable("CUDA_VISIBLE_DEVICES")
    return f"{name} (GPU {chosen})" if chosen and mx.cuda.is_available() else name


def memory_bytes() -> int:
    """Bytes of the memory that weights and KV live in."""
    if on_gpu():
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if key in info:
                return int(info[key])
    return machine_memory()


def memory_use() -> tuple[int, int]:
    """`peak_bytes`, and bytes of MLX's arrays now, without what it keeps for reuse. From any thread."""
    return peak_bytes(), int(mx.get_active_memory())


def peak_bytes() -> int:
    """Most memory that this process has used: on the device if there is one, else resident."""
    if on_gpu():
        return int(mx.get_peak_memory())
    return resident_bytes()


def resident_bytes() -> int:
    """Most memory of this machine, not of a device, that this process has used."""
    if sys.platform == "linux":
        # Not getrusage: its maximum is inherited from the parent process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
