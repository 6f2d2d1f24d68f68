"""Open the server's listening socket. A module of its own, as the supervisor imports nothing else of the server."""

from __future__ import annotations

import errno
import os
import socket

from tandem.errors import ConfigError
from tandem.system.ports import is_shadowed


def listen(host: str, port: int) -> socket.socket:
    """Return a listening TCP socket. Raises ConfigError if the address cannot be bound."""
    try:
        if is_shadowed(host, port):
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        found = socket.getaddrinfo(host or "0.0.0.0", port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        # Prefer IPv4: macOS lists ::1 first for localhost, which many clients do not try.
        family, kind, protocol, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        reason = error.strerror or str(error)
        message = f"--host {host} --port {port}: cannot listen there ({reason}); choose another port or host"
        raise ConfigError(message, param="port") from None
    return listener
