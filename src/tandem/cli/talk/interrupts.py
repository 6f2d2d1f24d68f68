"""Ctrl-C in a conversation: it counts where it means something, and is kept for the next such place elsewhere."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


class Interrupts:
    """What SIGINT does. Python raises KeyboardInterrupt between any two instructions, also while asyncio sets up a
    loop, a terminal is taken, or after the last line of a `try`: here `heard` alone raises it."""

    def __init__(self) -> None:
        """Nothing is changed yet."""
        self._raises = self._pressed = False
        self.told: Callable[[], object] = lambda: None
        """Called, in a signal handler, when one is kept."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Meanwhile `heard` and `taken` alone say where Ctrl-C counts. For the main thread."""
        before = signal.signal(signal.SIGINT, self._press)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _press(self, _number: int, _frame: FrameType | None) -> None:
        if self._raises:
            self._raises = False
            raise KeyboardInterrupt
        self._pressed = True
        self.told()

    def taken(self) -> bool:
        """Was one kept? It is not any more."""
        pressed, self._pressed = self._pressed, False
        return pressed

    @contextmanager
    def heard(self) -> Iterator[None]:
        """In the block, and for one kept before: raises KeyboardInterrupt."""
        try:
            self._raises = True
            if self.taken():
                raise KeyboardInterrupt
            yield
        finally:
            self._raises = False

    def each(self, things: Iterator[T]) -> Iterator[T]:
        """All of `things`. KeyboardInterrupt may come while one is waited for, not while it is used."""
        while True:
            with self.heard():
                try:
                    thing = next(things)
                except StopIteration:
                    return
            yield thing
