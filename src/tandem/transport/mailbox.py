"""A queue from any thread to one reader, which can poll it together with sockets."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A FIFO queue with a socket that becomes readable when an item is put."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.socket, self._bell = socket.socketpair()
        self.socket.setblocking(False)
        self._bell.setblocking(False)

    def put(self, item: T) -> None:
        """Add an item without blocking, from any thread or a finaliser. Items put after `close` are lost."""
        self._items.put(item)
        with suppress(OSError):  # its buffer is full, or the mailbox is closed
            self._bell.send(b"!")

    def take(self, timeout_s: float = 0.0) -> Iterator[T]:
        """Yield all queued items; wait up to `timeout_s` seconds for the first. For the single reader.

        Items that are not consumed stay queued.
        """
        # Empty the socket first: an item put later then causes at worst a spurious wake-up, never a missed one.
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
