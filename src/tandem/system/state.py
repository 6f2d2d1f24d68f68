"""State of a process as the kernel reports it."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

_LIBPROC = "/usr/lib/libproc.dylib"
_BASIC_INFO, _BASIC_INFO_BYTES = 3, 136
"""Value of `PROC_PIDTBSDINFO` in <sys/proc_info.h>, and the size of its struct in bytes."""
_LETTERS = {1: "I", 2: "R", 3: "S", 4: "T", 5: "Z"}
"""Letters that Linux and `ps` use for the states `SIDL` to `SZOMB` of <sys/proc.h>."""


def process_state(pid: int) -> str:
    """Return a letter: R running, S sleeping, D waiting for a disk, T stopped, Z zombie; empty when unknown."""
    try:
        if sys.platform == "darwin":
            return _mac_state(pid)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode("ascii")
    except (OSError, IndexError):
        return ""


def _mac_state(pid: int) -> str:
    info = (ctypes.c_uint32 * (_BASIC_INFO_BYTES // 4))()
    size = _libproc().proc_pidinfo(pid, _BASIC_INFO, ctypes.c_uint64(0), info, _BASIC_INFO_BYTES)
    return _LETTERS.get(info[1], "") if size == _BASIC_INFO_BYTES else ""  # info[0] holds flags


@functools.cache
def _libproc() -> ctypes.CDLL:
    return ctypes.CDLL(_LIBPROC)
