"""Device of MLX on this machine, as JSON: `python -m tandem.loading.device`, which `processes/device.py` runs.

An argument `cpu` or `gpu` is the ranks' `--device`.
"""

from __future__ import annotations

import json
import sys

import mlx.core as mx

from tandem.errors import ConfigError
from tandem.loading.memory import choose_device, memory_bytes, on_gpu

if __name__ == "__main__":
    try:
        choose_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    except ConfigError as error:
        sys.exit(error.message)
    name = str(mx.device_info().get("device_name", "GPU")) if on_gpu() else "CPU"
    sys.stdout.write(json.dumps({"gpu": on_gpu(), "memory_bytes": memory_bytes(), "name": name}))
