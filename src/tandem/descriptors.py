"""How many files and sockets this process may have open at once.

Shells start processes with few (256 on macOS), although the system would give more to whoever asks.
"""

from __future__ import annotations

import resource

WANTED = 10_240
"""Descriptors to ask for: the most that macOS gives to a process without further ado."""


def raise_limit(wanted: int = WANTED) -> int:
    """Raise this process's soft limit of open descriptors to `wanted`, or as far as the hard limit lets it.

    Children inherit it. A limit that is higher already stays. Returns the limit that holds afterwards; never raises.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):  # a sandbox may forbid it; what there is must do
            return soft
        return target
    return soft
