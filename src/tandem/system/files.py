"""Why a file cannot be opened, where the system's own words mislead."""

from __future__ import annotations

import errno
import resource
import sys

WITHHELD = ("macOS withholds this folder from programs that were started over ssh, or by an app without permission: "
            "move the model out of Documents, Desktop, Downloads and external volumes, or allow it (System Settings, "
            "General, Sharing, Remote Login, Allow full disk access for remote users; for an app: Privacy & Security, "
            "Full Disk Access)")


def file_trouble(error: OSError) -> str:
    """Why a file cannot be opened or read, and what to do where the system's words do not say it.

    macOS's privacy rules answer EPERM; the modes of a file answer EACCES.
    """
    words = error.strerror or str(error)
    if sys.platform == "darwin" and error.errno == errno.EPERM:
        return f"{words}: {WITHHELD}"
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{words}: this process may have {most}; raise the limit (`ulimit -n 65536`) and start it again"
    return words
