"""What MLX computes on here, as JSON: `python -m tandem.loading.device`. `processes/device.py` asks it."""

from __future__ import annotations

import json
import sys

import mlx.core as mx

from tandem.loading.memory import memory_bytes, on_gpu

if __name__ == "__main__":
    name = str(mx.device_info().get("device_name", "GPU")) if on_gpu() else "CPU"
    sys.stdout.write(json.dumps({"gpu": on_gpu(), "memory_bytes": memory_bytes(), "name": name}))
