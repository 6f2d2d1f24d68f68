"""IPC server of the engine: a thread that serves apis over a Unix socket, so apis get answers during long steps."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tandem.crash_guard import start_thread
from tandem.errors import TransportError, UsageError
from tandem.log import Seldom
from tandem.protocol import control
from tandem.protocol.codec import Decoder, encode
from tandem.protocol.request import MAX_PICTURE_BYTES
from tandem.transport.mailbox import Mailbox
from tandem.transport.socket_file import SocketFile

log = logging.getLogger(__name__)
seldom = Seldom(log)

SILENCE_S = 15.0
"""Seconds without a message after which an api counts as lost, and its requests are aborted."""
DOUBT_S = 2.0
"""Seconds without a message before an api is probed: sending fails if its socket is closed."""
MAX_FRAME = 64 * 2**20 + MAX_PICTURE_BYTES
Client = bytes
Inbound = control.Order


class IPCServer:
    """ROUTER socket on `path` for apis, with mailboxes to and from the engine's thread.

    The server answers status and metrics queries from the last published state, and passes other messages to the engine.
    """

    def __init__(self, path: Path, status: control.EngineStatus, metrics: Callable[[], bytes]) -> None:
        self.path = path
        self._status = (status, time.monotonic())
        self._metrics = metrics
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            self._open()
        except UsageError:
            self._context.destroy(0)
            raise
        except (zmq.ZMQBaseError, NotImplementedError, OSError) as error:
            self._context.destroy(0)
            raise UsageError(
                f"cannot listen on {self.path}: {error}; choose another --engine-socket, or more open files with `ulimit -n`",
                param="engine_socket",
            ) from error
        self._seen: dict[Client, float] = {}
        """Time of each api's last message, in seconds of `time.monotonic`."""
        self._asked: dict[Client, float] = {}
        """Time of the last liveness probe, by client."""
        self._decoder = Decoder[control.ApiMessage](control.ApiMessage)
        self.inbox: Mailbox[tuple[Client, Inbound]] = Mailbox()
        """Messages of apis for the engine."""
        self._outbox: Mailbox[list[bytes]] = Mailbox()
        """Frames for apis; an empty list closes the server."""
        self._thread = start_thread(self._run, name="ipc_server")

    def _open(self) -> None:
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 500
        self._router.maxmsgsize = MAX_FRAME
        self._router.sndhwm = 0
        self._router.router_mandatory = True  # raise when sending to an api that has disconnected
        if self.path.exists() and is_heard(self.path):
            raise UsageError(
                f"an engine is listening on {self.path} already; end it, or choose another --engine-socket", param="engine_socket"
            )
        self._file = SocketFile(self._router, self.path)

    # --- the engine's thread ---

    @property
    def status(self) -> control.EngineStatus:
        """Last status published by the engine's thread."""
        return self._status[0]

    @status.setter
    def status(self, status: control.EngineStatus) -> None:
        self._status = (status, time.monotonic())

    def receive(self, timeout_s: float) -> list[tuple[Client, Inbound]]:
        """Return all messages of apis for the engine; wait up to `timeout_s` seconds for the first."""
        return list(self.inbox.take(timeout_s))

    def send(self, client: Client, *messages: control.EngineMessage) -> None:
        """Send messages to one api, one frame each; dropped if it has disconnected."""
        self._outbox.put([client, *map(encode, messages)])

    def close(self) -> None:
        """Send pending messages, end the thread and remove the socket file."""
        self._outbox.put([])
        self._thread.join(5.0)
        self._outbox.close()
        self.inbox.close()
        self._context.term()
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()

    # --- the server's thread ---

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._outbox.socket, zmq.POLLIN)
        with self._router:  # closed on any error too, as `close` waits for it
            while self._forward_outputs():
                self._take_requests()
                self._forget_silent()
                self._file.renew()
                poller.poll(1000)

    def _forward_outputs(self) -> bool:
        """Send queued frames; return False if the engine closes the server."""
        for frames in self._outbox.take():
            if not frames:
                return False
            self._send(frames)
        return True

    def _send(self, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart(frames)
        except zmq.ZMQError:
            self._forget(frames[0])

    def _answer(self, query_id: int) -> control.EngineStatus:
        status, at = self._status
        return msgspec.structs.replace(status, query_id=query_id, age_s=time.monotonic() - at)

    def _take_requests(self) -> None:
        while self._router.poll(0):
            client, *frames = self._router.recv_multipart()
            try:
                message = self._decoder.decode(frames[0] if len(frames) == 1 else b"")
            except TransportError as error:
                seldom.warning("Dropping a message of an api that cannot be read: %s; are both of one version?", error)
                continue
            self._seen[client] = time.monotonic()
            if isinstance(message, control.QueryStatus):
                answer: control.EngineMessage = self._answer(message.query_id)
            elif isinstance(message, control.QueryMetrics):
                answer = control.MetricsText(message.query_id, self._metrics())
            else:
                self.inbox.put((client, message))
                continue
            self._send([client, encode(answer)])

    def _forget_silent(self) -> None:
        now = time.monotonic()
        for client, seen in list(self._seen.items()):
            if now - seen > SILENCE_S:
                self._forget(client)
            elif now - max(seen, self._asked.get(client, 0.0)) > DOUBT_S:
                self._asked[client] = now
                self._send([client, encode(self._answer(0))])

    def _forget(self, client: Client) -> None:
        """Drop a lost api; its running requests are aborted."""
        self._asked.pop(client, None)
        if self._seen.pop(client, None) is not None:
            self.inbox.put((client, control.Detach()))


def is_heard(path: Path) -> bool:
    """Return True if a process listens on the socket file, False for a file left by a killed engine."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except BlockingIOError:  # a suspended listener with a full queue
            return True
        except OSError:
            return False
        return True
