"""Pooled threads for MLX's work, which are reused and never end.

MLX keeps compiled functions with Python objects in thread-local storage, and frees them when the thread ends. Up to Python
3.12 that is after `Thread.join` returns. If the interpreter exits just then, the process aborts ("terminate called without an
active exception"). Idle threads avoid that.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from tandem.crash_guard import start_thread

T = TypeVar("T")
_Work = tuple[Callable[[], None], threading.Event]
_unused: list[queue.SimpleQueue[_Work]] = []
"""Queues of the idle threads. `append` and `pop` are thread-safe."""


class LentThread:
    """One function call in a pooled thread, with the interface of a thread from `start_thread`."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Start `work` at once."""
        self._over = threading.Event()
        try:
            orders = _unused.pop()
        except IndexError:
            orders = queue.SimpleQueue()
            start_thread(partial(_serve, orders), name="mlx")
        orders.put((work, self._over))

    def join(self, timeout_s: float) -> None:
        """Wait for the function to return, at most `timeout_s` seconds."""
        self._over.wait(timeout_s)

    def is_alive(self) -> bool:
        """Return True while the function runs."""
        return not self._over.is_set()


def lent(work: Callable[[], T]) -> T:
    """Run `work` in a pooled thread and return its result; raise what it raises. For callers whose own thread may end.

    Use it to import MLX: what `mlx.nn` compiles is stored in the importing thread.
    """
    future: Future[T] = Future()

    def do() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - it is the caller's
            future.set_exception(error)

    LentThread(do)
    return future.result()


def _serve(orders: queue.SimpleQueue[_Work]) -> None:
    while True:
        work, over = orders.get()
        try:
            work()
        except BaseException:
            over.set()
            raise
        del work  # `work` may reference a model
        _unused.append(orders)
        over.set()
