"""Ask an engine for its status, without being its api."""

from __future__ import annotations

import contextlib
import time

import msgspec
import zmq

from tandem.errors import TransportError
from tandem.protocol.codec import Decoder
from tandem.protocol.control import EngineMessage, EngineStatus, Neighbours, QueryStatus

AGAIN_S = 1.0
"""Seconds after which an unanswered query is repeated: the engine may have been replaced meanwhile."""


class StatusProbe:
    """Client that queries one engine at a zmq `endpoint`."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        """Connect; a `context` stays the caller's. Raises TransportError when no socket can be opened."""
        self._own = zmq.Context() if context is None else None
        try:
            self._socket = (context or self._own or zmq.Context()).socket(zmq.DEALER)
        except zmq.ZMQError as error:
            raise TransportError(f"no socket can be opened: {error}") from error
        for option, value in ((zmq.LINGER, 0), (zmq.IMMEDIATE, 1), (zmq.RECONNECT_IVL, 50)):
            self._socket.setsockopt(option, value)
        self._socket.connect(endpoint)
        self._decoder = Decoder[EngineMessage](EngineMessage)
        self._asked: float | None = None
        self._told: Neighbours | None = None

    def ask(self, timeout_s: float = 0.0) -> EngineStatus | None:
        """Return the engine's status; None if no answer arrives within `timeout_s` seconds, then call again."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._question()
            left = max(deadline - time.monotonic(), 0.0)
            if self._socket.poll(int(min(left, 0.05) * 1000)):
                self._asked = None
                try:
                    message = self._decoder.decode(self._socket.recv())
                except TransportError:
                    continue  # from an engine of another version; its silence is noticed
                return message if isinstance(message, EngineStatus) else None
            if not left:
                return None

    def tell(self, news: Neighbours) -> None:
        """Send `news`, unless the engine has it already or is not connected."""
        if news != self._told:
            with contextlib.suppress(zmq.Again):
                self._socket.send(msgspec.msgpack.encode(news), zmq.NOBLOCK)
                self._told = news

    def _question(self) -> None:
        now = time.monotonic()
        if self._asked is not None and now - self._asked < AGAIN_S:
            return
        try:
            self._socket.send(msgspec.msgpack.encode(QueryStatus(1)), zmq.NOBLOCK)
            self._asked = now
        except zmq.Again:
            return

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        if self._own is not None:
            self._own.term()
