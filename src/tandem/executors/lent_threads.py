"""Threads for MLX's work, which are lent and given back, and never end by themselves.

MLX keeps what it has compiled in thread-local storage, with Python's objects in it, and lets go of those when the
thread ends. Up to Python 3.12 that comes after `Thread.join` has returned: when the interpreter ends just then, the
process is aborted ("terminate called without an active exception"). A thread that waits for work is no trouble.
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
"""Each is what one thread waits at. `append` and `pop` are safe in any thread."""


class LentThread:
    """Does one piece of work, as a thread of `start_thread` does."""

    def __init__(self, work: Callable[[], None]) -> None:
        """Begins at once."""
        self._over = threading.Event()
        try:
            orders = _unused.pop()
        except IndexError:
            orders = queue.SimpleQueue()
            start_thread(partial(_serve, orders), name="mlx")
        orders.put((work, self._over))

    def join(self, timeout_s: float) -> None:
        """Wait until the work is done, at most `timeout_s` seconds."""
        self._over.wait(timeout_s)

    def is_alive(self) -> bool:
        """True while it works."""
        return not self._over.is_set()


def lent(work: Callable[[], T]) -> T:
    """Have `work` done in such a thread, and wait for it: the caller's own may end at any time. Raises what it raises.

    Importing MLX is such work: what `mlx.nn` compiles for later is kept for the thread that imports it.
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
        del work  # it may hold a model
        _unused.append(orders)
        over.set()
