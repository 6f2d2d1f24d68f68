"""Detection of ports in use that the system would still allow to bind."""

from __future__ import annotations

import ipaddress
import sys
from contextlib import suppress

from tandem.system.privacy import refusal

ANSWER_S = 0.5


def is_shadowed(host: str, port: int) -> bool:
    """Return True when `host`:`port` already has a listener although binding to it would succeed. Only on macOS.

    macOS allows one listener on all addresses beside one on 127.0.0.1, and each gets some of the connections.
    """
    if sys.platform != "darwin" or port == 0:
        return False
    with suppress(ValueError):  # a host name
        if ipaddress.ip_address(host or "0.0.0.0").is_unspecified:
            host = "127.0.0.1"
    return refusal(host, port, ANSWER_S) is None
