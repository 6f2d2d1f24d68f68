"""Speed of what joins the ranks of this machine: collectives of an MLX backend, and the hand-off between stages."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from tandem.bench.comm_rank import MODULE, CommPayload
from tandem.errors import RankFailure
from tandem.launchers.local import LocalLauncher
from tandem.launchers.worlds import make_world
from tandem.processes.child import ChildProcess
from tandem.protocol.keys import ClusterKeys

POLL_S = 0.05


def measure(backend: str, ranks: int, sizes: list[int], iterations: int, *, timeout_s: float) -> list[dict[str, Any]]:
    """Rows of `operation`, `bytes`, `median_us`, `p99_us` and `gb_per_s` (10**9 bytes), smallest sizes first.

    Operations: `all_sum` over all ranks; `tcp` and, where the backend is a ring, `ring`: one hop from a rank to the
    next, as pipeline stages hand over. Raises LayoutError for a backend that cannot be had here, RankFailure when a
    rank fails or `timeout_s` seconds pass.
    """
    world = make_world(backend, ranks, 0)
    launcher = LocalLauncher(1, MODULE)
    processes: list[ChildProcess] = []
    try:
        with tempfile.TemporaryDirectory(prefix="tandem-comm-") as directory:
            keys = ClusterKeys.generate()
            for rank in range(ranks):
                payload = CommPayload(rank=rank, ranks=ranks, backend=backend, sizes=sizes, iterations=iterations,
                                      directory=directory, keys=keys)
                processes.append(launcher.start(rank, ranks, msgspec.json.encode(payload), world.variables(rank)))
            _wait(processes, time.monotonic() + timeout_s)
            rows: list[dict[str, Any]] = json.loads((Path(directory) / "results.json").read_text())
            return rows
    finally:
        for process in processes:
            process.kill()
            process.wait(5.0)
        world.remove()


def _wait(processes: list[ChildProcess], deadline: float) -> None:
    while (codes := [process.poll() for process in processes]) != [0] * len(processes):
        failed = next((rank for rank, code in enumerate(codes) if code), None)
        if failed is not None:
            raise RankFailure(f"rank {failed} {processes[failed].describe_exit()}; what it says stands above",
                              rank=failed)
        if time.monotonic() > deadline:
            late = [rank for rank, code in enumerate(codes) if code is None]
            raise RankFailure(f"ranks {late} have not ended in time (--timeout)")
        time.sleep(POLL_S)
