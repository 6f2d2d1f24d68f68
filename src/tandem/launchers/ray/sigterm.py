"""SIGTERM in a process that joins a Ray cluster."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """For `ray.init`: SIGTERM goes on doing what it did before.

    Ray puts a handler of its own in place, which ends the process with code 15, and in front of it one of absl's, whose
    alarm aborts the process (SIGABRT) when it has not ended 3 s after the signal. Where nothing handled SIGTERM before,
    Ray's handler stays, without the alarm.
    """
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            now = signal.getsignal(signal.SIGTERM)
            # Also where it is the same: to set it takes absl's out of its way.
            signal.signal(signal.SIGTERM, now if before in (signal.SIG_DFL, None) else before)
