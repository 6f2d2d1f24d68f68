"""One process that measures how a matrix is read after pauses: `python -m tandem.firstlight.idle` (mlx)."""

from __future__ import annotations

import json
import sys
import time

import mlx.core as mx

from tandem.borders import own_process
from tandem.loading.memory import choose_device, on_gpu, on_metal
from tandem.processes.child import receive_payload, watch_lifeline

MODULE = "tandem.firstlight.idle"
SIDE = 4096
WARM = 5


def measure(megabytes: int, pauses: list[float], wired: bool) -> dict[str, float]:
    """Milliseconds of a product with each of the matrices, warm and after each pause in seconds.

    Raises ValueError when a product is wrong.
    """
    choose_device("auto")
    dtype = mx.bfloat16 if on_gpu() else mx.float32
    count = max(megabytes * 2**20 // (SIDE * SIDE * dtype.size), 1)
    weights = [mx.full((SIDE, SIDE), 1 / SIDE, dtype=dtype) for _ in range(count)]
    mx.eval(weights)
    if wired and on_metal():
        mx.clear_cache()
        mx.set_wired_limit(mx.get_active_memory())
    x = mx.ones((1, SIDE), dtype=dtype)

    def product() -> float:
        began = time.perf_counter()
        y = x
        for matrix in weights:
            y = y @ matrix
        mx.eval(y)
        spent = 1e3 * (time.perf_counter() - began)
        if not mx.allclose(y.astype(mx.float32), mx.ones_like(x, dtype=mx.float32), atol=0.1).item():
            raise ValueError(f"a product with ones gives ones, expected; {y.mean().item()} on average, seen")
        return spent

    found = {"warm": min(product() for _ in range(WARM))}
    for pause in pauses:
        time.sleep(pause)
        found[f"after {pause:g} s"] = product()
    return found


def main() -> int:
    """Print the figures as JSON, or why there are none on stderr."""
    own_process()
    words = json.loads(receive_payload())
    watch_lifeline()
    try:
        found = measure(words["megabytes"], words["pauses"], words["wired"])
    except (ValueError, RuntimeError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
