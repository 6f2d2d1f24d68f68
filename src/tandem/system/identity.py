"""Identity of this machine. Host names are no identity: two Macs may both be called `Mac`, and macOS renames them."""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
from contextlib import suppress
from pathlib import Path

from tandem.system.tools import output_of, sysctl

_UUID = re.compile(r'"IOPlatformUUID"\s*=\s*"([0-9A-Fa-f-]+)"')


@functools.cache
def machine_id() -> str:
    """Return an id common to exactly those processes that share this machine's memory, independent of its name.

    On a Mac the hardware's UUID. On Linux the boot id and the number of the mount namespace, so a container counts as a
    machine. The host name where neither is available.
    """
    if sys.platform == "darwin":
        match = _UUID.search(output_of(["ioreg", "-rd1", "-c", "IOPlatformExpertDevice"]) or "")
        return match[1] if match else socket.gethostname()
    with suppress(OSError):
        return f"{boot_id()}/{os.stat('/proc/self/ns/mnt').st_ino}"
    return socket.gethostname()


def boot_id() -> str:
    """Return the id of the machine's current boot; empty where the system provides none."""
    if sys.platform == "darwin":
        return sysctl("kern.bootsessionuuid")
    with suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""
