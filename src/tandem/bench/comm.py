"""Speed of what joins the ranks of this machine, and of its steps: ranks as children of this process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tandem.bench.messages import MODULE, CommPayload, RankTimes
from tandem.errors import RankFailure
from tandem.launchers.base import World
from tandem.launchers.local import LocalLauncher
from tandem.launchers.worlds import free_ports, make_world
from tandem.processes.child import ChildProcess
from tandem.protocol.keys import ClusterKeys

POLL_S = 0.05
HERE = "127.0.0.1"


def measure(backend: str, ranks: int, sizes: list[int], iterations: int, *, timeout_s: float, fast_sync: bool = False
            ) -> RankTimes:  # fmt: skip
    """What rank 0 finds, smallest sizes first.

    Operations: `all_sum` over all ranks, of an array that is there, and `between` two operations of the device; `tcp`
    and, where the backend is a ring, `ring`: one hop from a rank to the next, as pipeline stages hand over. Raises
    LayoutError for a backend that cannot be had here, RankFailure when a rank fails or `timeout_s` seconds pass.
    """
    world = make_world(backend, ranks, 0)
    try:
        group = payloads(backend, [HERE] * ranks, free_ports(ranks), sizes, iterations, fast_sync)
        return _run(group, world, timeout_s)
    finally:
        world.remove()


def measure_here(timeout_s: float) -> RankTimes:
    """The steps of this machine, with all of its cores. Raises RankFailure."""
    return _run([CommPayload()], None, timeout_s)


def payloads(backend: str, addresses: Sequence[str], ports: Sequence[int], sizes: list[int], iterations: int,
             fast_sync: bool) -> list[CommPayload]:
    """For the ranks of a group, each of which listens at its address and port."""
    keys, count = ClusterKeys.generate(), len(addresses)
    ends = [f"tcp://{address}:{port}" for address, port in zip(addresses, ports, strict=True)]
    return [CommPayload(rank=rank, ranks=count, backend=backend, sizes=sizes, iterations=iterations, keys=keys,
                        listen=(addresses[rank], ports[rank]), following=ends[(rank + 1) % count], fast_sync=fast_sync)
            for rank in range(count)]


def _run(group: Sequence[CommPayload], world: World | None, timeout_s: float) -> RankTimes:
    launcher = LocalLauncher(1 if world else None, MODULE)
    processes: list[ChildProcess] = []
    with tempfile.TemporaryDirectory(prefix="tandem-comm-") as directory:
        results = [Path(directory) / f"found-{one.rank}.json" for one in group]
        try:
            for one in group:
                payload = msgspec.structs.replace(one, result=str(results[one.rank]))
                processes.append(launcher.start(one.rank, len(group), msgspec.json.encode(payload),
                                                world.variables(one.rank) if world else {}))
            _wait(processes, time.monotonic() + timeout_s)
            return msgspec.json.decode(results[0].read_bytes(), type=RankTimes)
        finally:
            for process in processes:
                process.kill()
                process.wait(5.0)


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
