"""How a stage's arrays reach the next stage: one small interface over channels and MLX groups."""

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
    """Both ends of one stage in the ring of stages; pipeline models keep their order."""

    def send(self, array: mx.array, step_id: int) -> None:
        """Hand `array` to the next stage."""

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, step_id: int) -> mx.array:
        """Wait for the array that the stage before sent in `step_id`."""


class ChannelLink:
    """Arrays as pipeline models of a `transport` channel, each checked against the step, type and shape that the plan implies.

    A thread of its own waits for arrays and sends them, so that the rank can build the next step meanwhile.
    """

    def __init__(self, channel: TcpChannel) -> None:
        self._channel = channel
        self._outbox: queue.SimpleQueue[tuple[FrameHeader, mx.array] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        start_thread(self._send_all, name="channel")

    def send(self, array: mx.array, step_id: int) -> None:
        """Dispatch `array` and queue it for sending. Raises what an earlier send raised."""
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
                # NumPy reads the array's own memory, once it is computed.
                self._channel.send(header, np.ascontiguousarray(bits).view(np.uint8).data)
            except Exception as error:  # noqa: BLE001 - a thread's border: the next send raises it
                self._error = error
                return

    def receive(self, shape: tuple[int, ...], dtype: mx.Dtype, step_id: int) -> mx.array:
        """Wait for the pipeline model; raises BatchDesync when it is not the expected one."""
        data = self._channel.receive(FrameHeader(step_id, dtype_name(dtype), shape))
        flat = np.frombuffer(data, dtype=dtype_name(storage_dtype(dtype)))
        return mx.array(flat).view(dtype).reshape(shape)


class LastTokens:
    """The token that each sequence was given last, left in the array in which it came."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[mx.array, int]] = {}

    def put(self, ids: Sequence[str | None], tokens: mx.array) -> None:
        """Record `tokens` (int32 [n]) as the latest of `ids`; None stands for an ended sequence."""
        self._places.update((request_id, (tokens, i)) for i, request_id in enumerate(ids) if request_id is not None)

    def of(self, ids: Sequence[str]) -> mx.array:
        """int32 [n]: the latest tokens of `ids`. KeyError for one that has none."""
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
    """Tokens on their way back from the last stage to the first, which feeds on them.

    Frames come in the order of the steps, over all micro-batches; they are read when a batch needs its own, and at the latest
    when the engine has the result too, so that unread ones never pile up.
    """

    def __init__(self, link: StageLink, plans_under_way: int, last: LastTokens) -> None:
        """Put the tokens that arrive into `last`."""
        self._link = link
        self._slack = plans_under_way
        self._last = last
        self._expected: list[tuple[int, list[str | None]]] = []

    def expect(self, plan: StepPlan, ids: list[str]) -> None:
        """The last stage will send the tokens of `ids`, in this order."""
        if ids:
            self._expected.append((plan.step_id, [*ids]))

    def forget(self, request_id: str) -> None:
        """Drop an ended sequence, and its tokens that are still to come."""
        for _, ids in self._expected:
            ids[:] = [None if one == request_id else one for one in ids]

    def drain(self, step_id: int) -> None:
        """Read every frame that must have been sent before the engine could send the plan `step_id`."""
        while self._expected and self._expected[0][0] < step_id - self._slack:
            self._read()

    def await_tokens(self, ids: Sequence[str]) -> None:
        """Read until all tokens of `ids` are there."""
        wanted = set(ids)
        while any(not wanted.isdisjoint(expected) for _, expected in self._expected):
            self._read()

    def _read(self) -> None:
        step_id, ids = self._expected.pop(0)
        tokens = self._link.receive((len(ids),), mx.int32, step_id)
        self._last.put(ids, tokens)
