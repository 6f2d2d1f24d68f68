"""A directory in which nothing may be imported: files that hide modules of Python and of libraries."""

from __future__ import annotations

from pathlib import Path

HIDDEN = ("random", "json", "sitecustomize", "usercustomize", "numpy", "msgspec", "zmq", "bisect", "logging", "socket")
"""Modules that every process of Tandem's imports, or Python itself at its start."""
FILE = """\
import sys
with open({mark!r}, "a") as file:
    file.write(__name__ + " in " + " ".join(sys.orig_argv) + chr(10))
raise ImportError("a file in the working directory was imported: " + __name__)
"""


def plant(directory: Path, mark: Path) -> None:
    """Put a file for each of `HIDDEN` there; one that is imported adds a line to `mark`."""
    for name in HIDDEN:
        (directory / f"{name}.py").write_text(FILE.format(mark=str(mark)))


def imported(mark: Path) -> str:
    """What was imported, and by which commands; empty when nothing was."""
    return mark.read_text() if mark.exists() else ""
