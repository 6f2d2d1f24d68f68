"""Client of the supervisor's control socket: polls the list of replicas once a second and sends commands."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import zmq

from tandem.crash_guard import start_task
from tandem.errors import TransportError
from tandem.log import Seldom
from tandem.protocol import supervisor_messages as messages
from tandem.protocol.codec import Decoder
from tandem.protocol.events import KEPT, Event
from tandem.server.waiting import end_tasks

logger = logging.getLogger(__name__)
seldom = Seldom(logger)

INTERVAL_S, BEGIN_S = 1.0, 0.1
"""Seconds between polls: normally, and while replicas start or stop."""
ANSWER_S = 0.05
"""Seconds between a poll and reading its answer."""

OnReplicas = Callable[[messages.ReplicaList], Awaitable[None]]
Reached = Callable[[], int]
"""Function that returns the number of engines that are connected and take requests."""


class SupervisorLink:
    """Poller of the control socket at `path`. Use only on the event loop that called `start`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._task: asyncio.Task[None] | None = None
        self._awake = asyncio.Event()
        self._number = self._fresh_from = 0
        """Numbers of the last poll, and of the first poll after the last command: earlier answers are outdated."""
        self.events: deque[Event] = deque(maxlen=KEPT)
        """Latest events of the supervisor, oldest first."""

    async def start(self, on_replicas: OnReplicas, reached: Reached = lambda: 0) -> None:
        """Start polling: call `on_replicas` with each answer, and report `reached()` with each poll.

        The supervisor need not run yet.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL, 50)):
            self._socket.setsockopt(option, value)
        self._socket.connect(f"ipc://{self._path}")
        self._decode = Decoder[messages.SupervisorReply](messages.SupervisorReply).decode
        self._task = start_task(self._run(on_replicas, reached), name="supervisor-link")

    async def close(self) -> None:
        """Stop polling and close the socket."""
        if self._task is None:
            return
        await end_tasks(self._task)
        self._socket.close()
        self._context.term()
        self._task = None

    def tell(self, request: messages.LoadModel | messages.UnloadModel | messages.NoteEvent) -> None:
        """Send a command. The next list given to `on_replicas` reflects it."""
        self._send(request)
        if not isinstance(request, messages.NoteEvent):
            self._fresh_from = self._number + 1
        self._awake.set()

    async def _run(self, on_replicas: OnReplicas, reached: Reached) -> None:
        known: int | None = None
        while True:
            self._awake.clear()
            self._number += 1
            self._send(messages.ListReplicas(os.getpid(), reached(), self.events[-1].number if self.events else 0, self._number))
            await asyncio.sleep(ANSWER_S)
            latest = self._answer()
            if latest is not None:
                # Poll fast while a replica drains (it is never reached); failed ones stay for long and do not count.
                known = sum(replica.state != "failed" for replica in latest.replicas)
                await on_replicas(latest)
            if known is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._awake.wait(), (INTERVAL_S if reached() >= known else BEGIN_S) - ANSWER_S)

    def _send(self, request: messages.SupervisorRequest) -> None:
        try:
            # A REP socket expects an empty frame before the message.
            self._socket.send_multipart([b"", msgspec.msgpack.encode(request)], zmq.NOBLOCK)
        except zmq.Again:
            return

    def _answer(self) -> messages.ReplicaList | None:
        """Read all received messages; return the latest list that is not outdated, or None."""
        latest: messages.ReplicaList | None = None
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return latest
            try:
                message = self._decode(frames[-1])
            except TransportError as error:
                seldom.error("unreadable message from the supervisor: %s; it is asked again", error)
                continue
            if isinstance(message, messages.ReplicaList):
                latest = message if message.number >= self._fresh_from else latest
                known = self.events[-1].number if self.events else 0  # answers may overlap, as the next poll may come first
                self.events.extend(event for event in message.events if event.number > known)
            elif isinstance(message, messages.ControlRefused):
                seldom.error("the supervisor refuses: %s; it is asked again", message.message)
