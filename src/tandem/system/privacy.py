"""The local network, which macOS withholds from programs until a person allows it, and how that looks to a program."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import sys

from tandem.system.tools import output_of

LOCAL_NETWORK = (
    "macOS withholds the local network from the app that started this (iTerm, VS Code, tmux or a launch "
    "agent need a permission, Terminal and ssh do not): System Settings, Privacy & Security, Local "
    "Network, turn it on there; or start it from Terminal or over ssh"
)
LOCAL_NETWORK_PANE = "x-apple.systempreferences:com.apple.preference.security?Privacy_LocalNetwork"
"""Address of that page of the settings, for `open`."""
_INET = re.compile(r"^\s+inet (\S+) netmask (0x[0-9a-f]{8})", re.MULTILINE)


def network_withheld(error: OSError, address: str) -> bool:
    """True when `error`, of a connection to `address`, is most likely macOS's Local Network privacy.

    It shows as "No route to host" for an address of one of this machine's own subnets; others need a route, and may
    well have none.
    """
    if sys.platform != "darwin" or error.errno != errno.EHOSTUNREACH:
        return False
    try:
        wanted = ipaddress.IPv4Address(socket.gethostbyname(address))
    except (OSError, ValueError):
        return False
    return any(wanted in network for network in _own_networks())


def _own_networks() -> list[ipaddress.IPv4Network]:
    text = output_of(["ifconfig", "-a"]) or ""
    return [
        ipaddress.IPv4Network(f"{address}/{ipaddress.IPv4Address(int(mask, 16))}", strict=False)
        for address, mask in _INET.findall(text)
    ]


def silent_because(host: str, port: int, timeout_s: float = 1.0) -> str:
    """Why no connection to `host`:`port` comes about, where the system knows; else empty. For what did not answer."""
    error = refusal(host, port, timeout_s)
    return "" if error is None or isinstance(error, TimeoutError) else connect_trouble(error, host)


def refusal(host: str, port: int, timeout_s: float) -> OSError | None:
    """Return why no connection to `host`:`port` comes about; None if one does."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return error
    return None


def connect_trouble(error: OSError, address: str) -> str:
    """Why a connection to `address` failed, in words that say what to do where macOS refused it."""
    words = error.strerror or str(error)
    return f"{words}: {LOCAL_NETWORK}" if network_withheld(error, address) else words
