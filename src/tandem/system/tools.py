"""Running the tools that an operating system brings along."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

COMMAND_S = 10.0
SYSTEM_PATHS = ":/usr/sbin:/sbin:/usr/bin:/bin"
"""Behind the user's PATH: a shell over ssh, and a service, often have no sbin."""


def find_tool(name: str) -> str | None:
    """The path of a program; None if it is not installed."""
    return shutil.which(name, path=os.pathsep.join(os.get_exec_path()) + SYSTEM_PATHS)


def output_of(words: Sequence[str]) -> str | None:
    """Return what a command prints, on stderr if nothing else; None if it is not installed or does not end."""
    done = _run(words)
    return None if done is None else (done.stdout or done.stderr).decode(errors="replace")


def sysctl(name: str) -> str:
    """One value of macOS's `sysctl`; empty where there is none."""
    done = _run(["sysctl", "-n", name])
    return "" if done is None else done.stdout.decode(errors="replace").strip()


def _run(words: Sequence[str]) -> subprocess.CompletedProcess[bytes] | None:
    if (program := find_tool(words[0])) is None:
        return None
    try:
        return subprocess.run([program, *words[1:]], capture_output=True, timeout=COMMAND_S, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
