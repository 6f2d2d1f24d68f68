"""macOS's Local Network privacy: a program may not use the local network until a person allows it."""

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
"""URL of that settings page, for `open`."""
_INET = re.compile(r"^\s+inet (\S+) netmask (0x[0-9a-f]{8})", re.MULTILINE)


def network_withheld(error: OSError, address: str) -> bool:
    """Return True when `error`, of a connection to `address`, is most likely due to macOS's Local Network privacy.

    It appears as "No route to host" for an address in one of this machine's own subnets. For other addresses a route may
    really be missing.
    """
    if sys.platform != "darwin" or error.errno != errno.EHOSTUNREACH:
        return False
    try:
        wanted = ipaddress.IPv4Address(socket.gethostbyname(address))
    except (OSError, ValueError):
        return False
    return any(wanted in own.network for own in inet_addresses(output_of(["ifconfig", "-a"]) or ""))


def inet_addresses(ifconfig: str) -> list[ipaddress.IPv4Interface]:
    """Return the IPv4 addresses in the output of macOS's `ifconfig`."""
    found = _INET.findall(ifconfig)
    return [ipaddress.IPv4Interface(f"{address}/{ipaddress.IPv4Address(int(mask, 16))}") for address, mask in found]


def silent_because(host: str, port: int, timeout_s: float = 1.0) -> str:
    """Return why connecting to `host`:`port` fails; empty if it succeeds or times out."""
    error = refusal(host, port, timeout_s)
    return "" if error is None or isinstance(error, TimeoutError) else connect_trouble(error, host)


def refusal(host: str, port: int, timeout_s: float) -> OSError | None:
    """Try to connect to `host`:`port`. Return the error, or None on success."""
    try:
        socket.create_connection((host, port), timeout=timeout_s).close()
    except OSError as error:
        return error
    return None


def connect_trouble(error: OSError, address: str) -> str:
    """Return why a connection to `address` failed, with a remedy where macOS's privacy blocks it."""
    words = error.strerror or str(error)
    return f"{words}: {LOCAL_NETWORK}" if network_withheld(error, address) else words
