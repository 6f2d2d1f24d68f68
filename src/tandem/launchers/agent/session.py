"""One program that an agent runs for a head. Nothing here waits: a program that does not read, or does not end, is no
reason to keep other heads waiting."""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import suppress

from tandem.env import child_environment
from tandem.processes.interpreter import module_command

END_S = 3.0
"""Seconds that a program gets to end by itself once its input is closed."""
MOST_UNREAD = 8 * 2**20
"""Bytes kept for a program that does not read; what is beyond is a reason to end it."""


class Session:
    """A running program and its pipes."""

    def __init__(self, identity: bytes, owner: str, module: str) -> None:
        """Start it for the head whose connection is `identity` and whose key is `owner`. Raises OSError."""
        self.identity, self.owner = identity, owner
        self._process = subprocess.Popen(module_command(module), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                         stderr=subprocess.STDOUT, env=child_environment(), start_new_session=True,
                                         bufsize=0)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self.input, self.output = self._process.stdin.fileno(), self._process.stdout.fileno()
        os.set_blocking(self.input, False)
        self.heard = time.monotonic()
        self._unread = bytearray()
        self._closing = False
        self.reason: str | None = None
        """Why it is being ended; empty when it ended by itself, None while it shall run."""
        self._deadline = 0.0

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def behind(self) -> bool:
        """Something waits for the program to read it."""
        return bool(self._unread)

    def write(self, data: bytes) -> bool:
        """To its standard input, as far as it reads; the rest is kept. False when too much is kept."""
        if not self._closing:
            self._unread += data
        self.flush()
        return len(self._unread) <= MOST_UNREAD

    def flush(self) -> None:
        """Write what was kept."""
        try:
            while self._unread:
                del self._unread[:os.write(self.input, self._unread[:65536])]
        except BlockingIOError:
            return
        except OSError:  # it has ended, or closed its input
            self._unread.clear()
        if self._closing and self._process.stdin is not None:
            with suppress(OSError):
                self._process.stdin.close()

    def close_input(self) -> None:
        """When all is read."""
        self._closing = True
        self.flush()

    def end(self, reason: str) -> None:
        """Close its input, at once; from now on `ended` says when it is over. The first reason counts."""
        if self.reason is None:
            self.reason, self._deadline = reason, time.monotonic() + END_S
            self._unread.clear()
            self.close_input()

    def ended(self) -> int | None:
        """Its exit code when it is over; one that has been told to end, and does not in time, is killed."""
        code = self._process.poll()
        if code is None and self.reason is not None and time.monotonic() > self._deadline:
            self._process.kill()
        if code is not None:
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._closing = True
            self.flush()
        return code
