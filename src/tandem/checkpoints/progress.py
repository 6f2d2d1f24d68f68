"""How far a download or a load has come."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all (0 while unknown)."""


def counter(progress: Progress | None, total: int) -> Callable[[int], None]:
    """Adds up the bytes that it is called with, and tells `progress`."""
    done = 0

    def add(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return add
