"""Logging set-up, the same for every process: to stderr, one line a message, each with the process's own prefix.

Rich output on a terminal, plain lines with time and level otherwise. Prompts, answers and keys are never logged; that
is kept where messages are written, not here.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time

from rich.console import Console
from rich.logging import RichHandler

from tandem.printable import printable

ROOT = "tandem"
"""Name of the logger above all of ours."""


ERASE_LINE = "\r\x1b[2K"
SELDOM_S = 60.0
"""Seconds between two lines about the same thing that anybody can bring about as often as he likes."""
_MOST_KINDS = 64


class Seldom:
    """Logger that writes each kind of message once a minute, with the number suppressed since."""

    def __init__(self, logger: logging.Logger) -> None:
        """Lines go to `logger`. From any thread."""
        self._logger = logger
        self._seen: dict[str, tuple[float, int]] = {}

    def log(self, level: int, message: str, *arguments: object, kind: str = "") -> None:
        """Log a line unless one of its `kind` (by default its `message`) was logged lately."""
        now, kind = time.monotonic(), kind or message
        until, left_out = self._seen.get(kind, (0.0, 0))
        if now < until:
            self._seen[kind] = (until, left_out + 1)
            return
        if len(self._seen) > _MOST_KINDS:
            self._seen.clear()
        self._seen[kind] = (now + SELDOM_S, 0)
        more = f" ({left_out} more like it since the last line)" if left_out else ""
        self._logger.log(level, f"{message}%s", *arguments, more)

    def warning(self, message: str, *arguments: object) -> None:
        """At that level."""
        self.log(logging.WARNING, message, *arguments)

    def error(self, message: str, *arguments: object) -> None:
        """At that level."""
        self.log(logging.ERROR, message, *arguments)


class _Prefix(logging.Filter):
    """Puts the process's prefix before each message. It may change while the process runs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.prefix = f"{self.text} " if self.text else ""
        return True


class _Formatter(logging.Formatter):
    """Lines that may quote other machines."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))


class _TerminalHandler(RichHandler):
    """Begins a line of its own: another process may have left a live one (cli/startup.py) without an end."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # a terminal that is gone; the line itself is the base class's to try
            self.console.file.write(ERASE_LINE)
        super().emit(record)


_prefix = _Prefix()


def set_up(level: str = "INFO", *, prefix: str = "") -> None:
    """Send this process's log to stderr. `level` is that of Tandem's own messages; libraries log from WARNING on.

    Calling it again replaces what an earlier call set up.
    """
    handler: logging.Handler
    if sys.stderr.isatty():
        handler = _TerminalHandler(console=Console(stderr=True), show_path=False, markup=False, rich_tracebacks=False)
        handler.setFormatter(_Formatter("%(prefix)s%(message)s", datefmt="%H:%M:%S"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(prefix)s%(message)s"))
    handler.addFilter(_prefix)
    root = logging.getLogger()
    for old in root.handlers[:]:
        if any(isinstance(known, _Prefix) for known in old.filters):
            root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level)
    set_prefix(prefix)


def set_prefix(prefix: str) -> None:
    """Text before every message of this process, such as `[Rank 0] stage 1/2 layers 0-14`."""
    _prefix.text = prefix
