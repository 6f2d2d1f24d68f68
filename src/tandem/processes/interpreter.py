"""Command lines that start Python without the working directory on `sys.path`.

Python puts it first for `-m` and `-c`. A server started inside the directory of a downloaded model would then import that
model's `random.py` in place of the standard library's. `-P` omits it; PYTHONPATH still applies.
"""

from __future__ import annotations

import sys

SAFE = "-P"


def module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """Return the command `python -P -m module arguments...`; `python` None means this interpreter."""
    return [python or sys.executable, SAFE, "-m", module, *arguments]


def code_command(code: str, *arguments: str) -> list[str]:
    """Return the command `python -P -c code arguments...` with this interpreter."""
    return [sys.executable, SAFE, "-c", code, *arguments]


def leave_working_directory(path: list[str]) -> None:
    """Remove the working directory, which `python -m` puts first, from `path` (`sys.path`) unless `-P` was given."""
    if not sys.flags.safe_path:
        del path[:1]
