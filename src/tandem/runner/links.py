"""Transfer of arrays to the next stage: one interface over channels and MLX groups."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import Protocol

import mlx.core as mx
import numpy as np

from tandem.comm.group import dispatch
from tandem.crash_guard import start_thread
from tandem.loading.stage_payload import dtype_name, storage_dtype
from tandem.protocol.step import StepPlan
from tandem.transport.channel import FrameHeader, TcpChannel


class StageLink(Protocol):
    """Connections of a stage to the next and the previous one in the ring of stages. Order is kept."""

    def send(self, array: mx.array, step_id: int) -> None:
        """Send `array` to the next stage."""

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, step_id: int) -> mx.array:
        """Return the array that the previous stage sent in `step_id`; wait for it."""


class ChannelLink:
    """Link over a `transport` channel. Each array is checked against the step, type and shape that the plan implies.

    A thread waits for arrays and sends them, so the rank can build the next step meanwhile.
    """

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        self._outbox: queue.SimpleQueue[tuple[FrameHeader, mx.array] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        start_thread(self._send_all, name="channel")

    def send(self, array: mx.array, step_id: int) -> None:
        """Dispatch `array` and queue it for sending. Raises the error of an earlier send."""
        if self._error is not None:
            raise self._error
        header = FrameHeader(step_id, dtype_name(array.dtype), tuple(array.shape))
        bits = array.view(storage_dtype(array.dtype))
        dispatch(bits)
        self._outbox.put((header, bits))

    def _send_all(self) -> None:
        while (item := self._outbox.get()) is not None:
            header, bits = item
            try:
                # NumPy waits for the array and reads its memory directly.
                self._channel.send(header, np.ascontiguousarray(bits).view(np.uint8).data)
            except Exception as error:  # noqa: BLE001 - a thread's border: the next send raises it
                self._error = error
                return

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, step_id: int) -> mx.array:
        """Return the next array; wait for it. Raises BatchDesync if it is not the expected one."""
        data = self._channel.receive(FrameHeader(step_id, dtype_name(dtype), shape))
        flat = np.frombuffer(data, dtype=dtype_name(storage_dtype(dtype)))
        return mx.array(flat).view(dtype).reshape(shape)


class LastTokens:
    """Last token of each sequence, kept in the array in which it was sampled or received."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[mx.array, int]] = {}

    def put(self, ids: Sequence[str | None], tokens: mx.array) -> None:
        """Record `tokens` (int32 [n]) as the last ones of `ids`; None marks an ended sequence."""
        self._places.update((request_id, (tokens, i)) for i, request_id in enumerate(ids) if request_id is not None)

    def of(self, ids: Sequence[str]) -> mx.array:
        """Return int32 [n]: the last tokens of `ids`. Raises KeyError for an id without one."""
        places = [self._places[request_id] for request_id in ids]
        arrays = list({id(array): array for array, _ in places}.values())
        starts, total = {}, 0
        for array in arrays:
            starts[id(array)] = total
            total += array.shape[0]
        order = [starts[id(array)] + i for array, i in places]
        tokens = arrays[0] if len(arrays) == 1 else mx.concatenate(arrays)
        return tokens if order == list(range(total)) else tokens[mx.array(order)]

    def forget(self, request_id: str) -> None:
        """Drop an ended sequence."""
        self._places.pop(request_id, None)


class TokenInbox:
    """Receiver of sampled tokens on the first stage, sent by the last one.

    Messages arrive in step order, over all micro-batches. They are read when a batch needs its tokens, or when the engine
    must have the result too, so that unread ones do not accumulate.
    """

    def __init__(self, link: StageLink, plans_under_way: int, last: LastTokens) -> None:
        """Put received tokens into `last`. `plans_under_way`: maximum plans in progress."""
        self._link = link
        self._slack = plans_under_way
        self._last = last
        self._expected: list[tuple[int, list[str | None]]] = []

    def expect(self, plan: StepPlan, ids: list[str]) -> None:
        """Expect the tokens of `ids`, in this order, from the last stage."""
        if ids:
            self._expected.append((plan.step_id, [*ids]))

    def forget(self, request_id: str) -> None:
        """Drop an ended sequence, and its tokens still in transit."""
        for _, ids in self._expected:
            ids[:] = [None if one == request_id else one for one in ids]

    def drain(self, step_id: int) -> None:
        """Read every message that was sent before the engine could send plan `step_id`."""
        while self._expected and self._expected[0][0] < step_id - self._slack:
            self._read()

    def await_tokens(self, ids: Sequence[str]) -> None:
        """Read messages until all tokens of `ids` have arrived."""
        wanted = set(ids)
        while any(not wanted.isdisjoint(expected) for _, expected in self._expected):
            self._read()

    def _read(self) -> None:
        step_id, ids = self._expected.pop(0)
        tokens = self._link.receive((len(ids),), mx.int32, step_id)
        self._last.put(ids, tokens)
