"""Commands that start a Python of ours: never with the working directory among the places of modules.

Python puts it first for `-m` and `-c`. Whoever serves a downloaded model from within its directory would then run that
model's `random.py` in place of the library's. `-P` leaves it out; PYTHONPATH counts as ever.
"""

from __future__ import annotations

import sys

SAFE = "-P"


def module_command(module: str, *arguments: str, python: str | None = None) -> list[str]:
    """`python -m module arguments...`, by this interpreter unless another is named."""
    return [python or sys.executable, SAFE, "-m", module, *arguments]


def code_command(code: str, *arguments: str) -> list[str]:
    """`python -c code arguments...`."""
    return [sys.executable, SAFE, "-c", code, *arguments]


def leave_working_directory(path: list[str]) -> None:
    """For a process that was started with `python -m`: take its working directory out of `path` (`sys.path`) again."""
    if not sys.flags.safe_path:
        del path[:1]
