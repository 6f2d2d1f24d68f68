"""MLX's ring backend as a pipeline hand-off: send to the next rank, receive from the one before.

The ring needs `MLX_HOSTFILE` and `MLX_RANK` in the environment, which the launcher sets; it reaches neighbours only,
checks neither peers nor shapes, and a peer that is stuck keeps a receive waiting for good. Whoever uses it must be
supervised from another process.
"""

from __future__ import annotations

import mlx.core as mx

from tandem.comm.group import join_group


class RingLink:
    """`send` and `receive` arrays over a ring of `size` ranks. Used by one thread alone."""

    def __init__(self, size: int) -> None:
        """Join the ring. Blocks, with the interpreter lock held, until all ranks are there (or 31 s have passed)."""
        self._group = join_group("ring", size)
        self._next = (self._group.rank() + 1) % size
        self._previous = (self._group.rank() - 1) % size
        # Sends wait in a stream of their own, so that the next computation need not wait for the receiver.
        self._outbound = mx.new_stream(mx.cpu)
        self._inbound = mx.new_stream(mx.cpu)

    def send(self, array: mx.array, step_id: int) -> None:
        """Start sending; returns before the peer has received."""
        mx.eval(array)
        mx.async_eval(mx.distributed.send(array, self._next, group=self._group, stream=self._outbound))

    def flush(self) -> None:
        """Wait until the peer has received everything."""
        mx.synchronize(self._outbound)

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, step_id: int) -> mx.array:
        """Wait for an array of exactly this shape and type. The ring carries no step numbers to check."""
        array = mx.distributed.recv(shape, dtype, self._previous, group=self._group, stream=self._inbound)
        mx.eval(array)
        return array
