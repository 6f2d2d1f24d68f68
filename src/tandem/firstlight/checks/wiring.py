"""Weights in a GPU's memory after a pause: wired or not, refreshed or not."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

from tandem.env import child_environment
from tandem.firstlight.check import Differs, Figures, Task
from tandem.firstlight.idle import MODULE
from tandem.processes.child import ChildProcess
from tandem.processes.device import this_device
from tandem.system.metal import REFRESH, REFRESH_MS

MOST_MB, CPU_MB = 16 * 1024, 256
ROUND_S = 60.0
SLACK, SLACK_MS = 3.0, 20.0
"""Wired and refreshed weights may take so many times as long after a pause as warm ones, and so much more."""
PAUSES = [0.0, 1.5, 5.0] if sys.platform == "darwin" else [0.0, 1.5]
COMBINATIONS = {"not wired": (False, "0"), "wired": (True, "0"), "wired and refreshed": (True, REFRESH_MS)}


def wiring(task: Task) -> Figures:
    """Milliseconds of a step over half of the GPU's memory, warm and after pauses, for each way to keep it there."""
    device = this_device()
    megabytes = min(device.memory_bytes // 2 >> 20, MOST_MB) if device.gpu else CPU_MB
    mac = device.gpu and sys.platform == "darwin"
    figures: Figures = {"MiB of weights": megabytes}
    for name, (wired, refresh) in COMBINATIONS.items() if mac else [("as it is here", (False, "0"))]:
        found = _measured(megabytes, wired, refresh)
        figures |= {f"{name}, {when}, ms": round(value, 2) for when, value in found.items()}
        slowest = max(found.values())
        if refresh == REFRESH_MS and slowest > SLACK * found["warm"] + SLACK_MS:
            raise Differs(f"{name}: about as fast after a pause as without ({found['warm']:.1f} ms), expected; "
                          f"{slowest:.1f} ms, seen", figures)
    return figures


def _measured(megabytes: int, wired: bool, refresh: str) -> dict[str, float]:
    with tempfile.TemporaryFile() as output:
        words = json.dumps({"megabytes": megabytes, "pauses": PAUSES, "wired": wired}).encode()
        child = ChildProcess(MODULE, words, env=child_environment({REFRESH: refresh}), name="measuring process",
                             output=output.fileno())
        ended = child.wait(ROUND_S)
        child.kill()
        child.wait(10.0)
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines() or [""]
    try:
        found: Any = json.loads(lines[-1])
        return {str(name): float(value) for name, value in found.items()}
    except (ValueError, AttributeError):
        raise Differs(lines[-1] or (f"it {child.describe_exit()}" if ended else
                                    f"it did not come back within {ROUND_S:g} s")) from None
