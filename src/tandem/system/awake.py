"""Keeping a Mac from falling asleep while it serves: neither a GPU's work nor open connections do that."""

from __future__ import annotations

import functools
import logging
import os
import subprocess
import sys

from tandem.env import child_environment
from tandem.system.tools import find_tool

log = logging.getLogger(__name__)


def keep_awake() -> int | None:
    """Hold off idle sleep of the system for as long as this process lives. Does nothing off macOS.

    `caffeinate -w` ends with this process, however that ends. The display may sleep: a lit one makes macOS's GPU
    watchdog stricter. A closed lid, and the end of a battery, cannot be held off (docs/two-machines.md). Returns the
    process id of what holds it off.
    """
    holder = _hold(os.getpid()) if sys.platform == "darwin" else None
    return None if holder is None else holder.pid


@functools.cache  # one is enough for a process
def _hold(pid: int) -> subprocess.Popen[bytes] | None:
    program = find_tool("caffeinate")
    if program is None:
        log.warning("caffeinate is missing: this Mac may sleep while it serves (`sudo pmset sleep 0` prevents it)")
        return None
    try:
        return subprocess.Popen(
            [program, "-i", "-s", "-w", str(pid)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=child_environment(),
            start_new_session=True,
        )
    except OSError as error:
        log.warning("caffeinate does not start (%s); this Mac may fall asleep while it serves", error)
        return None
