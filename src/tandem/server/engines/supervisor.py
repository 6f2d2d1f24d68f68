"""How the api learns which engines there are: it asks the supervisor's control socket once a second."""

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
"""Seconds between two questions, and while replicas come or go."""
ANSWER_S = 0.05
"""Seconds after a question at which the answer is looked for."""

OnReplicas = Callable[[messages.ReplicaList], Awaitable[None]]
Reached = Callable[[], int]
"""Says how many engines are connected and take requests."""


class SupervisorLink:
    """Polls the control socket at `path`. Belongs to the event loop that called `start`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._task: asyncio.Task[None] | None = None
        self._awake = asyncio.Event()
        self._number = self._fresh_from = 0
        """Number of the last question, and of the first one after the last command: earlier answers are outdated."""
        self.events: deque[Event] = deque(maxlen=KEPT)
        """Latest events of the supervisor."""

    async def start(self, on_replicas: OnReplicas, reached: Reached = lambda: 0) -> None:
        """Call `on_replicas` with the list, now and whenever it was asked for; tell the supervisor what `reached` says.

        No supervisor need answer.
        """
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL, 50)):
            self._socket.setsockopt(option, value)
        self._socket.connect(f"ipc://{self._path}")
        self._decode = Decoder[messages.SupervisorReply](messages.SupervisorReply).decode
        self._task = start_task(self._run(on_replicas, reached), name="supervisor-link")

    async def close(self) -> None:
        """Stop asking."""
        if self._task is None:
            return
        await end_tasks(self._task)
        self._socket.close()
        self._context.term()
        self._task = None

    def tell(self, request: messages.LoadModel | messages.UnloadModel | messages.NoteEvent) -> None:
        """Send a command. The next list that is handed on shows its effect."""
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
                # One that drains is never reached, and others wait for its room; a failed one stays for long.
                known = sum(replica.state != "failed" for replica in latest.replicas)
                await on_replicas(latest)
            if known is not None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._awake.wait(), (INTERVAL_S if reached() >= known else BEGIN_S) - ANSWER_S)

    def _send(self, request: messages.SupervisorRequest) -> None:
        try:
            # The empty frame is what a REP socket expects before the message.
            self._socket.send_multipart([b"", msgspec.msgpack.encode(request)], zmq.NOBLOCK)
        except zmq.Again:
            return

    def _answer(self) -> messages.ReplicaList | None:
        """The latest list that is here."""
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
                known = self.events[-1].number if self.events else 0  # an answer may come after it was asked again
                self.events.extend(event for event in message.events if event.number > known)
            elif isinstance(message, messages.ControlRefused):
                seldom.error("the supervisor refuses: %s; it is asked again", message.message)
