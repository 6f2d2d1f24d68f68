"""Entry point of a rank that times collectives and channels: `python -m tandem.bench.comm_rank`."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from tandem.bench.report import percentile
from tandem.errors import TandemError
from tandem.processes.child import receive_payload, watch_lifeline
from tandem.protocol.keys import ClusterKeys
from tandem.system.cuda import prepare_cuda
from tandem.transport.channel import FrameHeader, TcpChannel

if TYPE_CHECKING:
    from tandem.comm.ring import RingLink

MODULE = "tandem.bench.comm_rank"
WARM_UP = 5
ITEM_BYTES = 4


class CommPayload(Struct, frozen=True, kw_only=True):
    """What one rank is to do."""

    rank: int
    ranks: int
    backend: str
    sizes: list[int]
    """Bytes of one array."""
    iterations: int
    directory: str
    """Where ranks leave their addresses, and rank 0 the results."""
    keys: ClusterKeys


class _Timer:
    """Times of repeated calls, of which the first few do not count."""

    def __init__(self, payload: CommPayload) -> None:
        self._iterations = payload.iterations
        self.rows: list[dict[str, Any]] = []

    def __call__(self, operation: str, size: int, act: Callable[[int], None], hops: int = 1) -> None:
        """Call `act` with the number of the call; it takes `hops` messages of `size` bytes, one after the other."""
        times = []
        for i in range(WARM_UP + self._iterations):
            started = time.perf_counter()
            act(i)
            times.append((time.perf_counter() - started) / hops)
        median = percentile(times[WARM_UP:], 0.5)
        self.rows.append({"operation": operation, "bytes": size, "median_us": 1e6 * median,
                          "p99_us": 1e6 * percentile(times[WARM_UP:], 0.99), "gb_per_s": size / median / 1e9})


def run(payload: CommPayload) -> None:
    """Measure; rank 0 writes the results."""
    import mlx.core as mx

    from tandem.comm.group import StageGroup
    from tandem.comm.ring import RingLink
    from tandem.loading.memory import choose_device

    choose_device("auto")
    timer = _Timer(payload)
    group = StageGroup(payload.backend, payload.ranks)
    arrays = {size: mx.zeros(max(size // ITEM_BYTES, 1), mx.float32) for size in payload.sizes}
    for size, array in arrays.items():
        timer("all_sum", size, lambda _, array=array: mx.eval(group.sum(array)))  # type: ignore[misc]
    channel = _connected(payload)
    for size in payload.sizes:
        whole = max(size // ITEM_BYTES, 1) * ITEM_BYTES
        timer("tcp", whole, lambda step, size=whole: _lap(channel, payload.rank, step, size),  # type: ignore[misc]
              payload.ranks)
    if payload.backend == "ring":
        link = RingLink(payload.ranks)
        for size, array in arrays.items():
            timer("ring", size, lambda _, array=array: _ring_lap(link, payload.rank, array),  # type: ignore[misc]
                  payload.ranks)
    if payload.rank == 0:
        (Path(payload.directory) / "results.json").write_text(json.dumps(timer.rows))
    mx.eval(group.sum(mx.zeros(1)))  # nobody closes a channel that still holds something for others
    channel.close()


def _ring_lap(link: RingLink, rank: int, array: Any) -> None:
    """An array goes once around the ring of ranks."""
    if rank == 0:
        link.send(array, 0)
    received = link.receive(array.shape, array.dtype, 0)
    if rank != 0:
        link.send(received, 0)
    link.flush()


def _connected(payload: CommPayload) -> TcpChannel:
    """This rank's channel, whose sending end reaches the next rank."""
    channel = TcpChannel(payload.keys)
    directory = Path(payload.directory)
    mine = directory / f"endpoint-{payload.rank}"
    mine.with_suffix(".new").write_text(channel.endpoint)
    mine.with_suffix(".new").rename(mine)
    following = directory / f"endpoint-{(payload.rank + 1) % payload.ranks}"
    while not following.exists():
        time.sleep(0.005)
    channel.connect([following.read_text()])
    return channel


def _lap(channel: TcpChannel, rank: int, step: int, size: int) -> None:
    """`size` bytes go once around the ring of channels."""
    header = FrameHeader(step, "float32", (size // ITEM_BYTES,))
    if rank == 0:
        channel.send(header, bytes(size))
    data = channel.receive(header)
    if rank != 0:
        channel.send(header, data)


def main() -> None:
    """Measure and end."""
    payload = msgspec.json.decode(receive_payload(), type=CommPayload)
    watch_lifeline()
    prepare_cuda()
    try:
        run(payload)
    except (TandemError, RuntimeError, OSError) as error:
        print(f"rank {payload.rank}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - a process of its own
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    main()
