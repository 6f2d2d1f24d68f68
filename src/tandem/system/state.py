"""State of a process, from the kernel."""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path

_LIBPROC = "/usr/lib/libproc.dylib"
_BASIC_INFO, _BASIC_INFO_BYTES = 3, 136
"""`PROC_PIDTBSDINFO` of <sys/proc_info.h>, and the size of its struct."""
_LETTERS = {1: "I", 2: "R", 3: "S", 4: "T", 5: "Z"}
"""`SIDL` to `SZOMB` of <sys/proc.h>, by the letters that Linux and `ps` have for them."""


def process_state(pid: int) -> str:
    """A letter: R runs, S sleeps, D waits for a disk, T is stopped, Z has ended; empty where that is not known."""
    try:
        if sys.platform == "darwin":
            return _mac_state(pid)
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0].decode("ascii")
    except (OSError, IndexError):
        return ""


def _mac_state(pid: int) -> str:
    info = (ctypes.c_uint32 * (_BASIC_INFO_BYTES // 4))()
    size = _libproc().proc_pidinfo(pid, _BASIC_INFO, ctypes.c_uint64(0), info, _BASIC_INFO_BYTES)
    return _LETTERS.get(info[1], "") if size == _BASIC_INFO_BYTES else ""  # info[0] are flags


@functools.cache
def _libproc() -> ctypes.CDLL:
    return ctypes.CDLL(_LIBPROC)
