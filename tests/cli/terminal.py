"""A command on a terminal of its own (a pty), as a person has it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from typing import Self

_ESCAPES = re.compile(r"\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b[\[(][0-?]*[ -/]*[@-~]|\x1b[=>78M]")


class Terminal:
    """`tandem` (or another program) with all three streams on a terminal of 100 columns; it is ended with the block."""

    def __init__(self, *arguments: str, program: Sequence[str] = ("-m", "tandem"), **variables: str) -> None:
        master, end = pty.openpty()
        fcntl.ioctl(end, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
        environment = {
            **os.environ,
            "TERM": "xterm-256color",
            "COLUMNS": "100",
            "LINES": "40",
            "OPENBLAS_NUM_THREADS": "1",
            **variables,
        }
        self.process = subprocess.Popen(
            [sys.executable, *program, *arguments],
            stdin=end,
            stdout=end,
            stderr=end,
            env=environment,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(end)
        self._master = master
        self.raw = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self._drain(240)
            except AssertionError:
                self.process.kill()
        self.process.wait(240)
        os.close(self._master)

    @property
    def text(self) -> str:
        """What has been printed, without control sequences."""
        return _ESCAPES.sub("", self.raw).replace("\r", "")

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def read(self, seconds: float) -> bool:
        """Take what comes, for so long at most; False at the end."""
        readable, _, _ = select.select([self._master], [], [], seconds)
        if not readable:
            return True
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # Linux: nobody holds the other end any more
            return False
        self.raw += piece.decode(errors="replace")
        if "\x1b[6n" in self.raw[-len(piece) - 8 :]:  # where is the cursor?
            self.type("\x1b[1;1R")
        return bool(piece)

    def wait_for(self, words: str, *, times: int = 1, seconds: float = 240) -> None:
        """Until `words` have been printed so often."""
        deadline = time.monotonic() + seconds
        while self.text.count(words) < times:
            assert self.read(0.2) or self.text.count(words) >= times, f"ended without {words!r}: {self.text[-2000:]}"
            assert time.monotonic() < deadline, f"no {words!r}: {self.text[-2000:]}"

    def ends(self, seconds: float = 240) -> int:
        """Its exit code."""
        self._drain(seconds)
        return self.process.wait(240)

    def _drain(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self.read(0.2) and self.process.poll() is None:
            assert time.monotonic() < deadline, f"it does not end: {self.text[-2000:]}"
        while self.read(0.0) and select.select([self._master], [], [], 0)[0]:
            pass


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
