"""Logging set-up of every process: to stderr, one line per message, each with the process's prefix.

Rich output on a terminal, else plain lines with time and level, or JSON objects. Prompts, answers and keys are never logged;
the code that writes a message ensures that, not this module.
"""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import sys
import time
from datetime import datetime

from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from tandem.printable import printable

ROOT = "tandem"
"""Name of the parent of all Tandem loggers."""


ERASE_LINE = "\r\x1b[2K"
SELDOM_S = 60.0
"""Minimum seconds between two lines of the same kind that a client can trigger at will."""
_MOST_KINDS = 64


class Seldom:
    """Rate-limited logger: one line of each kind per `SELDOM_S`, with the number suppressed since."""

    def __init__(self, logger: logging.Logger) -> None:
        """Write to `logger`. Methods may be called from any thread."""
        self._logger = logger
        self._seen: dict[str, tuple[float, int]] = {}

    def log(self, level: int, message: str, *arguments: object, kind: str = "") -> None:
        """Log a line unless one of the same `kind` (default: `message`) was logged in the last `SELDOM_S` seconds."""
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
        """Log at level WARNING, rate-limited."""
        self.log(logging.WARNING, message, *arguments)

    def error(self, message: str, *arguments: object) -> None:
        """Log at level ERROR, rate-limited."""
        self.log(logging.ERROR, message, *arguments)


class _Prefix(logging.Filter):
    """Filter that sets `record.prefix`. `text` may change while the process runs."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""

    def filter(self, record: logging.LogRecord) -> bool:
        record.prefix = f"{self.text} " if self.text else ""
        return True


class _Formatter(logging.Formatter):
    """Formatter that removes control characters, since messages may quote other machines. Times have their zone."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class _JsonFormatter(_Formatter):
    """Formatter of JSON objects, one a line. `extra={"fields": {...}}` of a logging call adds members."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "host": socket.gethostname(),
            "pid": record.process,
            "process": _prefix.text.strip("[]"),
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


class _TerminalHandler(RichHandler):
    """Handler that first erases the terminal line: another process's progress line (cli/startup.py) may be unfinished."""

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone; the base class handles the failure of the message itself
            self.console.file.write(ERASE_LINE)
        super().emit(record)


_prefix = _Prefix()


def _clock(at: datetime) -> Text:
    return Text(f"{at.astimezone():%H:%M:%S%z}")


def set_up(level: str = "INFO", *, prefix: str = "", log_format: str = "auto") -> None:
    """Send this process's log to stderr. `level` applies to Tandem's loggers; libraries log from WARNING up.

    `log_format`: as the setting of that name. Another call replaces the handler of an earlier one.
    """
    handler: logging.Handler
    if log_format == "auto" and sys.stderr.isatty():
        handler = _TerminalHandler(
            console=Console(stderr=True), show_path=False, markup=False, rich_tracebacks=False, log_time_format=_clock
        )
        handler.setFormatter(_Formatter("%(prefix)s%(message)s"))
    else:
        handler = logging.StreamHandler(sys.stderr)
        plain = _Formatter("%(asctime)s %(levelname)s %(prefix)s%(message)s")
        handler.setFormatter(_JsonFormatter() if log_format == "json" else plain)
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
    """Set the text before every message of this process, such as `[Rank 0] stage 1/2 layers 0-14`."""
    _prefix.text = prefix
