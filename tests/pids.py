"""Process ids, of processes that may go while they are looked at."""

from __future__ import annotations

import psutil


def gone(pid: int) -> bool:
    """It has ended, though its parent may not have asked how."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
