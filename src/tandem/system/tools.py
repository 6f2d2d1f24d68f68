"""Execution of command-line tools of the operating system."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

COMMAND_S = 10.0
SYSTEM_PATHS = ":/usr/sbin:/sbin:/usr/bin:/bin"
"""Directories searched after the user's PATH: ssh shells and services often lack sbin."""


def find_tool(name: str) -> str | None:
    """Return the path of a program; None if it is not installed."""
    return shutil.which(name, path=os.pathsep.join(os.get_exec_path()) + SYSTEM_PATHS)


def output_of(words: Sequence[str]) -> str | None:
    """Return a command's stdout, or its stderr if that is empty; None if it is not installed or exceeds `COMMAND_S`."""
    done = _run(words)
    return None if done is None else (done.stdout or done.stderr).decode(errors="replace")


def sysctl(name: str) -> str:
    """Return one value of macOS's `sysctl`; empty if there is none."""
    done = _run(["sysctl", "-n", name])
    return "" if done is None else done.stdout.decode(errors="replace").strip()


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[bytes] | None:
    if (program := find_tool(words[0])) is None:
        return None
    try:
        return subprocess.run([program, *words[1:]], capture_output=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
