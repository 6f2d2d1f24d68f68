"""A queue from threads to one reader that may wait at several sockets."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """An ordered queue with a socket that turns readable when there is an item."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.socket, self._bell = socket.socketpair()
        self.socket.setblocking(False)
        self._bell.setblocking(False)

    def put(self, item: T) -> None:
        """Add an item, from any thread or a finaliser; never blocks. Items after `close` are lost."""
        self._items.put(item)
        with suppress(OSError):  # its buffer is full, or it is closed
            self._bell.send(b"!")

    def take(self, timeout_s: float = 0.0) -> Iterator[T]:
        """Yield all items; wait up to `timeout_s` seconds for the first. For the reader alone.

        Items that are not taken stay.
        """
        # Empty the socket first: an item that comes later then wakes the reader once too often, never too seldom.
        with suppress(OSError):
            while len(self.socket.recv(4096)) == 4096:
                pass
        with suppress(queue.Empty):
            yield self._items.get(timeout=timeout_s)
            while True:
                yield self._items.get_nowait()

    def close(self) -> None:
        """Close both sockets."""
        self.socket.close()
        self._bell.close()
