"""Prevention of idle sleep on a Mac while it serves: neither GPU work nor open connections prevent it."""

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
    """Prevent idle sleep of the system while this process lives. Return the process id of `caffeinate`, or None.

    None off macOS, and when `caffeinate` cannot be started. `caffeinate -w` ends with this process in any case. The display
    may sleep: a lit one makes macOS's GPU watchdog stricter. A closed lid or an empty battery cannot be overridden
    (docs/two-machines.md).
    """
    holder = _hold(os.getpid()) if sys.platform == "darwin" else None
    return None if holder is None else holder.pid


@functools.cache  # one `caffeinate` per process
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
