"""Description of this machine's MLX device (mlx). `processes/device.py` calls this in a sandbox."""

from __future__ import annotations

import mlx.core as mx

from tandem.loading.memory import choose_device, memory_bytes, on_gpu
from tandem.processes.device import Device


def describe_device(device: str) -> Device:
    """Return the device that a rank with `--device` uses. Sets MLX's device, so run in a separate process. Raise
    ConfigError."""
    choose_device(device)
    name = str(mx.device_info().get("device_name", "GPU")) if on_gpu() else "CPU"
    return Device(on_gpu(), memory_bytes(), name)
