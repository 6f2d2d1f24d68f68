"""Client for an engine's status, for processes other than its API server."""

from __future__ import annotations

import contextlib
import time

import msgspec
import zmq

from tandem.errors import TransportError
from tandem.protocol.codec import Decoder
from tandem.protocol.control import EngineMessage, EngineStatus, Neighbours, QueryStatus

AGAIN_S = 1.0
"""Seconds after which an unanswered query is repeated, since the engine may have been replaced."""


class StatusProbe:
    """Client that queries one engine at a ZeroMQ `endpoint`."""

    def __init__(self, endpoint: str, context: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        """Connect without blocking. The caller keeps ownership of `context`. Raises TransportError when no socket can be
        opened."""
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
        """Return the engine's status, or None after `timeout_s` seconds. A later call receives a delayed answer."""
        deadline = time.monotonic() + timeout_s
        while True:
            self._question()
            left = max(deadline - time.monotonic(), 0.0)
            if self._socket.poll(int(min(left, 0.05) * 1000)):
                self._asked = None
                try:
                    message = self._decoder.decode(self._socket.recv())
                except TransportError:
                    continue  # sent by another version; the missing answers are noticed
                return message if isinstance(message, EngineStatus) else None
            if not left:
                return None

    def tell(self, news: Neighbours) -> None:
        """Send the addresses of other replicas unless already sent. Do nothing while the engine is not connected."""
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
