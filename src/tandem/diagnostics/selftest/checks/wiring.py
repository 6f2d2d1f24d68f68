"""Checks of weights in GPU memory after a pause: wired or not, refreshed or not."""

from __future__ import annotations

import sys
import time

from tandem.diagnostics.selftest.check import Differs
from tandem.diagnostics.tasks import Figures, Task, check_parts
from tandem.processes.device import this_device
from tandem.system.metal import REFRESH, REFRESH_MS

MOST_MB, CPU_MB = 16 * 1024, 256
SIDE, WARM = 4096, 5
"""Side of each square matrix; products before the pauses."""
ROUND_S = 60.0
SLACK, SLACK_MS = 3.0, 20.0
"""Acceptable slowdown after a pause: a factor, plus milliseconds."""
PAUSES = [0.0, 1.5, 5.0] if sys.platform == "darwin" else [0.0, 1.5]
COMBINATIONS = {"not wired": (False, "0"), "wired": (True, "0"), "wired and refreshed": (True, REFRESH_MS)}


def wiring(task: Task) -> Figures:
    """Measure a step over half of the GPU's memory (at most 16 GiB), in milliseconds, warm and after pauses. Raises Differs if
    wired and refreshed weights become slow."""
    device = this_device()
    megabytes = min(device.memory_bytes // 2 >> 20, MOST_MB) if device.gpu else CPU_MB
    mac = device.gpu and sys.platform == "darwin"
    figures: Figures = {"MiB of weights": megabytes}
    for name, (wired, refresh) in COMBINATIONS.items() if mac else [("as it is here", (False, "0"))]:
        milliseconds = _measured(megabytes, wired, refresh)
        figures |= {f"{name}, {when}, ms": round(value, 2) for when, value in milliseconds.items()}
        slowest = max(milliseconds.values())
        if refresh == REFRESH_MS and slowest > SLACK * milliseconds["warm"] + SLACK_MS:
            raise Differs(
                f"{name}: about as fast after a pause as without ({milliseconds['warm']:.1f} ms), expected; "
                f"{slowest:.1f} ms, seen",
                figures,
            )
    return figures


def _measured(megabytes: int, wired: bool, refresh: str) -> dict[str, float]:
    options: dict[str, object] = {"megabytes": megabytes, "pauses": PAUSES, "wired": wired}
    with check_parts("wiring:products", [options], [{REFRESH: refresh}]) as [process]:
        finding = process.finding(ROUND_S)
    if finding.verdict != "ok":
        raise Differs(finding.detail)
    return {name: float(value) for name, value in finding.figures.items()}


def products(task: Task) -> Figures:
    """Multiply a vector by many matrices; return the milliseconds, warm and after each pause."""
    import mlx.core as mx

    from tandem.loading.memory import choose_device, on_gpu, on_metal, resident_size

    choose_device("auto")
    dtype = mx.bfloat16 if on_gpu() else mx.float32
    count = max(task.options["megabytes"] * 2**20 // (SIDE * SIDE * dtype.size), 1)
    weights = [mx.full((SIDE, SIDE), 1 / SIDE, dtype=dtype) for _ in range(count)]
    mx.eval(weights)
    if task.options["wired"] and on_metal():
        mx.clear_cache()
        mx.set_wired_limit(resident_size([matrix.nbytes for matrix in weights], mx.get_active_memory()))
    x = mx.ones((1, SIDE), dtype=dtype)

    def product() -> float:
        began = time.perf_counter()
        y = x
        for matrix in weights:
            y = y @ matrix
        mx.eval(y)
        spent = 1e3 * (time.perf_counter() - began)
        if not mx.allclose(y.astype(mx.float32), mx.ones_like(x, dtype=mx.float32), atol=0.1).item():
            raise Differs(f"a product with ones gives ones, expected; {y.mean().item()} on average, seen")
        return spent

    figures: Figures = {"warm": min(product() for _ in range(WARM))}
    for pause in task.options["pauses"]:
        time.sleep(pause)
        figures[f"after {pause:g} s"] = product()
    return figures
