"""Limit of open files and sockets of this process.

Shells set a low soft limit (256 on macOS), although the system allows a process to raise it.
"""

from __future__ import annotations

import resource

WANTED = 10_240
"""Descriptors to request: the most that macOS grants a process by default."""


def raise_limit(wanted: int = WANTED) -> int:
    """Raise this process's soft limit of open descriptors to `wanted`, or to the hard limit if that is lower.

    Children inherit it; a higher limit stays. Return the limit in effect afterwards. Never raises.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    target = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < target:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (target, hard))
        except (OSError, ValueError):  # a sandbox may forbid it: keep the present limit
            return soft
        return target
    return soft
