"""The control socket of `tandem serve`: server and client."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from tandem.engine.ipc_server import is_heard
from tandem.env import runtime_dir
from tandem.errors import TransportError, UsageError
from tandem.log import Seldom
from tandem.protocol.codec import Decoder
from tandem.protocol.supervisor_messages import ControlRefused, SupervisorReply, SupervisorRequest
from tandem.transport.security import translated
from tandem.transport.socket_file import SocketFile

log = logging.getLogger("tandem.cli")
seldom = Seldom(log)

MAX_FRAME = 2**20
ANSWER_S = 5.0
"""Timeout in seconds of a request to the supervisor."""

Handle = Callable[[SupervisorRequest], SupervisorReply]
_requests = Decoder[SupervisorRequest](SupervisorRequest)
_replies = Decoder[SupervisorReply](SupervisorReply)


def control_path(port: int) -> Path:
    """Return the path of the control socket of the server on `port`. Raises PermissionError for an unsafe directory."""
    return runtime_dir() / f"serve-{port}.sock"


class ControlServer:
    """REP socket that only this user can access. Used by one thread, which calls `serve` periodically."""

    def __init__(self, path: Path, handle: Handle) -> None:
        """Listen on `path`. A UsageError raised by `handle` is sent to the client as a refusal. Raises UsageError."""
        self._path = path
        self._handle = handle
        if is_heard(path):
            raise UsageError(f"a server listens on {path} already; choose another --port", param="port")
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.linger = 200
        self._socket.maxmsgsize = MAX_FRAME
        try:
            self._file = SocketFile(self._socket, path)
        except (zmq.ZMQBaseError, NotImplementedError, OSError) as error:
            self._socket.close()
            self._context.term()
            raise UsageError(f"cannot listen on {path}: {error}; set TANDEM_RUNTIME_DIR to another place") from error

    def serve(self, timeout_s: float) -> None:
        """Answer requests for `timeout_s` seconds."""
        self._file.renew()
        deadline = time.monotonic() + timeout_s
        while (left := deadline - time.monotonic()) > 0 and self._socket.poll(max(int(left * 1000), 1)):
            # Receive all frames of the message: REP cannot send before.
            self._socket.send(msgspec.msgpack.encode(self._answer(self._socket.recv_multipart())))

    def _answer(self, frames: list[bytes]) -> SupervisorReply:
        try:
            return self._handle(_requests.decode(frames[0] if len(frames) == 1 else b""))
        except UsageError as error:
            return ControlRefused(error.message)
        except TransportError as error:
            seldom.warning("Unreadable message on the control socket: %s; refusing it", error)
            return ControlRefused(f"the message cannot be read: {error}; is this the same version of Tandem?")

    def close(self) -> None:
        """Close the socket and remove its file."""
        self._socket.close()
        self._context.term()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


def ask(path: Path, request: SupervisorRequest, timeout_s: float = ANSWER_S) -> SupervisorReply:
    """Send a request and return the supervisor's answer. Raises UsageError without an answer, or with a refusal's message."""
    if not is_heard(path):
        raise UsageError(f"no server listens on {path}; name its port with --port, and run this as the same user", param="port")
    try:
        with translated("no connection"), zmq.Context() as context, context.socket(zmq.REQ) as client:
            client.linger = 0
            client.connect(f"ipc://{path}")
            client.send(msgspec.msgpack.encode(request))
            if not client.poll(int(timeout_s * 1000)):
                raise UsageError(f"the server on {path} does not answer within {timeout_s:g} s; it may be shutting down")
            reply = _replies.decode(client.recv())
    except TransportError as error:
        raise UsageError(f"the server's answer cannot be read: {error}; is it the same version?") from None
    if isinstance(reply, ControlRefused):
        raise UsageError(reply.message)
    return reply
