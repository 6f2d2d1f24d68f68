"""Memory of the machine or GPU that MLX computes on (mlx)."""

from __future__ import annotations

import logging
import resource
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx

from tandem.config.sizes import counted_memory
from tandem.env import machine_memory, variable
from tandem.errors import ConfigError
from tandem.system.metal import wires_memory

log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 64 * 1024 * 1024
GPU_CACHE_BYTES = 2 * 1024 * 1024 * 1024
CACHE_PART = 16
"""Divisor: freed buffers kept by a machine's ranks use at most this fraction of a small GPU's memory."""
HEADROOM = 0.15
"""Fraction of a GPU's memory that its ranks may use for temporaries, beyond `memory_share`."""
CUDA_SHARE = 0.95
"""Fraction of an NVIDIA GPU's memory that its ranks may use together; the rest is CUDA's own."""
SYSTEM_BYTES, SYSTEM_PART = 8 * 1024 * 1024 * 1024, 4
"""Memory of a Mac that is never wired: this many bytes, or a fourth of all memory if that is more."""
GIB = 1 << 30
CUDA_TYPES = "#include <cuda_bf16.h>\n#include <cuda_fp16.h>\n"
"""Begin of a CUDA kernel's header: types of 16 bits."""
PAGE, HEAP_BYTES, HEAP_ARRAY = 16384, 1 << 20, 256
"""Bytes of a page on Apple silicon, of the heap of MLX's Metal allocator, and of the largest array in that heap."""


def choose_device(device: str) -> None:
    """Set MLX's device for the whole process: `cpu`, `gpu`, or for `auto` TANDEM_DEVICE, else MLX's default.

    Raise ConfigError for an unknown or missing device.
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
    """Return the most bytes of freed buffers that each of `sharing` ranks on a machine keeps."""
    return min(GPU_CACHE_BYTES, memory_bytes() // CACHE_PART) // sharing if on_gpu() else CPU_CACHE_BYTES


def limit_memory(share: float, sharing: int, most: str | None = None) -> None:
    """Set MLX's memory and cache limits; without limits its buffers grow with the largest prompt.

    `share` is the fraction of memory for this rank's weights and KV; `sharing` is the number of ranks on the machine. From
    now on `memory_bytes` returns so little that the share of all these ranks is at most `most`, such as 32GB.
    Metal's default limit for each process is one and a half times all memory. Work queued on a GPU holds memory for
    layers and tokens ahead; at the limit MLX waits for it.
    """
    global _count
    _count = partial(counted_memory, fraction=share * sharing, most=most)
    mx.set_cache_limit(cache_bytes(sharing))
    if on_gpu():
        whole = 1.0 if on_metal() else CUDA_SHARE
        mx.set_memory_limit(int(memory_bytes() * min(whole / sharing, share + HEADROOM / sharing)))


class Wired(NamedTuple):
    """Result of wiring weights."""

    bytes: int
    """Bytes that macOS keeps in the GPU's memory."""
    trouble: str = ""
    """Reason why some weights are not wired, with the remedy; empty if all are, or if the user set the limit."""


def wire_weights(arrays: Iterable[mx.array], wanted: int | None, share: float) -> Wired:
    """Wire the loaded `arrays` into a Mac's GPU memory, so that macOS does not page them out while idle. No-op without
    Metal.

    Call with only the weights loaded and no step running. After a second macOS may give unwired memory to other
    processes. A model that nearly fills a Mac is then very slow. Only weights are wired: a wired set that KV and
    temporaries join and leave has caused kernel panics. `wanted` is the user's limit in bytes (0: none; None: no
    limit); `share` caps the fraction of memory.
    """
    if wanted == 0 or not on_metal():
        return Wired(0)
    if not wires_memory():
        return _troubled(0, "macOS 14 wires no memory: answers after a pause are late; update to macOS 15 or later")
    mx.clear_cache()
    loaded, installed = resident_size([array.nbytes for array in arrays], mx.get_active_memory()), machine_memory()
    most = int(share * min(memory_bytes(), max(installed - max(SYSTEM_BYTES, installed // SYSTEM_PART), 0)))
    intended = loaded if wanted is None else min(loaded, wanted)
    size = min(intended, most)
    mx.set_wired_limit(size)
    log.info("wired %d of %d MiB of weights", size >> 20, loaded >> 20)
    if size == intended:
        return Wired(size)
    return _troubled(
        size,
        f"{size / GIB:.1f} of {loaded / GIB:.1f} GiB of weights are wired, more would leave this "
        "Mac too little: answers after a pause are late; give it fewer layers, or smaller weights",
    )


def _troubled(size: int, trouble: str) -> Wired:
    log.warning("%s", trouble)
    return Wired(size, trouble)


def resident_size(sizes: Sequence[int], active: int) -> int:
    """Return the bytes that MLX's residency set counts for arrays of `sizes` bytes; `active` is MLX's active memory in
    bytes.

    The set counts whole pages, and the heap of the smallest arrays; the allocator counts bytes. A smaller limit
    excludes a tensor, a larger one admits temporaries.
    """
    pages = sum(_paged(size) for size in sizes if size > HEAP_ARRAY)
    counted = sum(size if size <= PAGE else _paged(size) for size in sizes)
    if active < sum(sizes):  # arrays that share a buffer
        pages = active + sum(_paged(size) - size for size in sizes if HEAP_ARRAY < size <= PAGE)
    return pages + _paged(max(active - counted, 0)) + HEAP_BYTES


def _paged(size: int) -> int:
    return -(-size // PAGE) * PAGE


def on_gpu() -> bool:
    """Return True if MLX computes on a GPU."""
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def on_metal() -> bool:
    """Return True if MLX computes on a Mac's GPU."""
    return on_gpu() and mx.metal.is_available()


def on_cuda() -> bool:
    """Return True if MLX computes on an NVIDIA GPU."""
    return on_gpu() and mx.cuda.is_available()


def small_product() -> None:
    """Multiply two small matrices on the device and wait. Raise RuntimeError if that fails."""
    ones = mx.ones((64, 64))
    mx.eval(ones @ ones)


def device_name() -> str:
    """Return the name of MLX's device for the log: the GPU's, with CUDA_VISIBLE_DEVICES if set."""
    if not on_gpu():
        return "the CPU"
    name = str(mx.device_info().get("device_name", "a GPU"))
    chosen = variable("CUDA_VISIBLE_DEVICES")
    return f"{name} (GPU {chosen})" if chosen and mx.cuda.is_available() else name


_count: Callable[[int], int] = int


def memory_bytes() -> int:
    """Return the bytes of the memory that holds weights and KV, within the limit of `limit_memory`."""
    if on_gpu():
        info = mx.device_info()
        for key in ("max_recommended_working_set_size", "total_memory", "memory_size"):
            if key in info:
                return _count(int(info[key]))
    return _count(machine_memory())


def memory_use() -> tuple[int, int]:
    """Return `peak_bytes` and the bytes of MLX's live arrays, without its cache of freed buffers. Thread-safe."""
    return peak_bytes(), int(mx.get_active_memory())


def peak_bytes() -> int:
    """Return the peak memory of this process in bytes: on the GPU if there is one, else resident."""
    if on_gpu():
        return int(mx.get_peak_memory())
    return resident_bytes()


def resident_bytes() -> int:
    """Return the peak resident host memory of this process in bytes."""
    if sys.platform == "linux":
        # Not getrusage: its maximum is inherited from the parent process.
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
