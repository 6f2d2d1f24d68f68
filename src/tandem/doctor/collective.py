"""One rank of a test group: adds arrays over all ranks and says how long it took. Run as `python -m` by the probe."""

from __future__ import annotations

import json
import statistics
import sys
import time

from tandem.processes.child import guarded_lifeline, receive_payload, watch_lifeline
from tandem.system.cuda import prepare_cuda

SIZES = (4096, 65536, 1 << 20)
"""Bytes of the arrays."""
ROUNDS = 20


def measure(backend: str) -> dict[str, float]:
    """Median seconds of an all_sum, by size in bytes. Raises RuntimeError when a sum is wrong or the group fails."""
    import mlx.core as mx

    from tandem.loading.memory import choose_device

    choose_device("auto")
    with guarded_lifeline():
        group = mx.distributed.init(strict=True, backend=backend)
    expected = group.size() * (group.size() + 1) / 2
    found = {}
    for size in SIZES:
        array = mx.full((size // 4,), float(group.rank() + 1))
        mx.eval(array)
        times = []
        for _ in range(ROUNDS):
            began = time.perf_counter()
            total = mx.distributed.all_sum(array, group=group)
            mx.eval(total)
            times.append(time.perf_counter() - began)
        if not bool(mx.all(total == expected).item()):
            raise RuntimeError(f"an all_sum of {size} bytes over {group.size()} ranks gave a wrong sum")
        found[str(size)] = statistics.median(times)
    return found


def main() -> int:
    """Print the figures as JSON, or the error on stderr."""
    backend = receive_payload().decode()
    watch_lifeline()
    prepare_cuda()
    try:
        sys.stdout.write(json.dumps(measure(backend)) + "\n")
    except (RuntimeError, ValueError, ImportError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
