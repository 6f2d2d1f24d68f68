"""A queue from threads to one reader that may sleep at several sockets."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """Queue of what threads put there, in order, with a socket that turns readable when there is something."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[T] = queue.SimpleQueue()
        self.socket, self._bell = socket.socketpair()
        self.socket.setblocking(False)
        self._bell.setblocking(False)

    def put(self, item: T) -> None:
        """Add an item, from any thread or a finaliser; never blocks. After `close` nobody hears of it."""
        self._items.put(item)
        with suppress(OSError):  # it has rung often enough, or is closed
            self._bell.send(b"!")

    def take(self, timeout_s: float = 0.0) -> Iterator[T]:
        """Yield all that is there; wait up to `timeout_s` seconds for the first. For the reader alone.

        Items that are not taken stay.
        """
        # Silence the bell first: what comes behind it then rings once too often, never too seldom.
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
