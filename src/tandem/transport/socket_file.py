"""Unix socket file that is recreated when a person or a clean-up job deletes it."""

from __future__ import annotations

import contextlib
import logging
import time
from pathlib import Path

import zmq

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two checks that the file exists."""


class SocketFile:
    """The `ipc://` file of a listening ZeroMQ socket, accessible to this user only. Used by the socket's thread."""

    def __init__(self, socket: zmq.Socket[bytes], path: Path) -> None:
        """Bind to `path`, replacing an old socket file. Raises FileExistsError for a file with content, ZMQError and OSError."""
        self._socket = socket
        self._path = path
        if path.is_file() and path.stat().st_size:
            raise FileExistsError("it is somebody's file, not a socket")
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        self._bind()

    def _bind(self) -> None:
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._socket.bind(f"ipc://{self._path}")
        self._path.chmod(0o600)
        self._looked_at = time.monotonic()

    def renew(self) -> None:
        """Recreate the file if it was deleted, so that new peers can connect. Checks at most every `LOOK_S` seconds."""
        if time.monotonic() - self._looked_at < LOOK_S:
            return
        self._looked_at = time.monotonic()
        if self._path.exists():
            return
        try:
            self._bind()
        except (zmq.ZMQBaseError, NotImplementedError, OSError) as error:
            log.error("%s was removed and cannot be created again: %s; new clients cannot connect", self._path, error)
        else:
            log.warning("%s was removed: created it again", self._path)
