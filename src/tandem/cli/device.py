"""What MLX computes on here, as JSON: `python -m tandem.cli.device`, so that a supervisor need not load MLX itself."""

from __future__ import annotations

import json

from tandem.models.memory import memory_bytes, on_gpu

if __name__ == "__main__":
    print(json.dumps({"gpu": on_gpu(), "memory_bytes": memory_bytes()}))
