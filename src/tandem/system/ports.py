"""Ports that another process has, though the system would give them out again."""

from __future__ import annotations

import ipaddress
import sys
from contextlib import suppress

from tandem.system.privacy import refusal

ANSWER_S = 0.5


def is_shadowed(host: str, port: int) -> bool:
    """True when `host`:`port` already has a listener and binding to it would not fail.

    macOS lets a listener of all addresses stand beside one of 127.0.0.1, and each gets some of the connections.
    """
    if sys.platform != "darwin" or port == 0:
        return False
    with suppress(ValueError):  # a name
        if ipaddress.ip_address(host or "0.0.0.0").is_unspecified:
            host = "127.0.0.1"
    return refusal(host, port, ANSWER_S) is None
