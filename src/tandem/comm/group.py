"""MLX process groups: the ranks of one pipeline stage over any backend, and the ring between stages.

The launcher sets the environment in which a backend finds its peers (launchers/process_groups.py). MLX offers no timeouts,
so nothing here has one: another process supervises the ranks by their progress.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import struct
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import mlx.core as mx

from tandem.env import variable
from tandem.errors import LayoutError

POLLING_CORES = 4
"""CPU cores per rank from which on MLX's ring threads may poll their sockets."""
_WAIT_US = 4000
"""Socket timeout of a ring thread in microseconds: its longest sleep in one direction while the other has work."""


def dispatch(*trees: object) -> None:
    """Start computing arrays, or trees of arrays, without blocking."""
    start: Callable[..., None] = mx.async_eval
    start(*trees)


def join_group(backend: str, size: int | None = None) -> mx.distributed.Group:
    """Join MLX's group of `size` ranks; block until all ranks have joined.

    `backend` is MLX's name: ring, jaccl, jaccl-ring, nccl, mpi, or any. `size` None takes the environment's group, or this
    process alone where no launcher has set one. Raises LayoutError when the group has another size.
    """
    # jaccl-ring is MLX's jaccl with an environment variable that prefers a ring over a mesh.
    strict = size is not None or variable("MLX_RANK") is not None
    group = mx.distributed.init(backend=backend.removesuffix("-ring"), strict=strict)
    if size not in (None, group.size()):
        raise LayoutError(
            f"the {backend} group has {group.size()} ranks, the layout {size}; start as many ranks as the layout names"
        )
    hosts = variable("MLX_HOSTFILE")
    if sys.platform == "linux" and hosts and len(os.sched_getaffinity(0)) < POLLING_CORES * group.size():
        _sleep_until_data(hosts)
    return group


def _sleep_until_data(hosts: str) -> None:
    """Make the sockets of MLX's ring blocking: polling would occupy the cores that other ranks need.

    `hosts` is the path of the host file.
    """
    addresses = {address for host in json.loads(Path(hosts).read_text()) for address in host}
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, or not connected
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as end:
                if end.family == socket.AF_INET and addresses & {
                    f"{ip}:{port}" for ip, port in (end.getsockname(), end.getpeername())
                }:
                    for timeout in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                        end.setsockopt(socket.SOL_SOCKET, timeout, struct.pack("ll", 0, _WAIT_US))
                    end.setblocking(True)


class StageGroup:
    """Collectives among the ranks of one stage. Used by one thread, in the same order on all ranks."""

    def __init__(self, backend: str, size: int) -> None:
        """Join the group with `join_group`."""
        self._group = join_group(backend, size)
        self.rank = self._group.rank()
        self.size = size

    def sum(self, x: mx.array) -> mx.array:
        """Return the elementwise sum of `x` over the ranks, bit-identical on all of them."""
        return mx.distributed.all_sum(x, group=self._group)

    def gather_last(self, x: mx.array, sizes: Sequence[int]) -> mx.array:
        """Concatenate the last axes of all ranks, `sizes[r]` long on rank r, in rank order."""
        width = max(sizes)
        rows = x.reshape(-1, x.shape[-1])
        if rows.shape[-1] < width:
            rows = mx.pad(rows, [(0, 0), (0, width - rows.shape[-1])])
        parts = mx.distributed.all_gather(rows, group=self._group).reshape(self.size, -1, width)
        whole = mx.concatenate([parts[rank, :, :size] for rank, size in enumerate(sizes)], axis=-1)
        return whole.reshape(*x.shape[:-1], sum(sizes))


class RingLink:
    """Point-to-point link on MLX's ring of `size` ranks: `send` to the next rank, `receive` from the previous one.

    Used by one thread. The launcher sets `MLX_HOSTFILE` and `MLX_RANK`. The ring reaches neighbours only and checks neither
    peers nor shapes. A stuck peer blocks `receive` forever, so another process must supervise the caller.
    """

    def __init__(self, size: int) -> None:
        """Join the ring. Block, with the GIL held, until all ranks have joined or 31 s have passed."""
        self._group = join_group("ring", size)
        self._next = (self._group.rank() + 1) % size
        self._previous = (self._group.rank() - 1) % size
        # Sends have their own stream, so that the next computation need not wait for the receiver.
        self._outbound = mx.new_stream(mx.cpu)
        self._inbound = mx.new_stream(mx.cpu)

    def send(self, array: mx.array, step_id: int) -> None:
        """Evaluate `array` and start sending it; return before the peer has received it. `step_id` is not sent."""
        mx.eval(array)
        dispatch(mx.distributed.send(array, self._next, group=self._group, stream=self._outbound))

    def flush(self) -> None:
        """Wait until all started sends are complete."""
        mx.synchronize(self._outbound)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, step_id: int) -> mx.array:
        """Wait for an array of this shape and type. The ring carries no step numbers, so `step_id` is not checked."""
        array = mx.distributed.recv(shape, dtype, self._previous, group=self._group, stream=self._inbound)
        mx.eval(array)
        return array
