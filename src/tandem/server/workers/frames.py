"""Messages over a stream socket between two processes that trust one another: a length, then the bytes."""

from __future__ import annotations

import socket
import struct

_LENGTH = struct.Struct("<Q")


def send_frame(connection: socket.socket, body: bytes) -> None:
    """Send a message. Raises OSError when the other side is gone."""
    connection.sendall(_LENGTH.pack(len(body)))
    connection.sendall(body)


def receive_frame(connection: socket.socket) -> bytearray | None:
    """The next message; None when the other side is gone. Raises TimeoutError."""
    head = _receive(connection, _LENGTH.size)
    return None if head is None else _receive(connection, _LENGTH.unpack(head)[0])


def _receive(connection: socket.socket, size: int) -> bytearray | None:
    buffer = bytearray(size)
    view, got = memoryview(buffer), 0
    while got < size:
        try:
            count = connection.recv_into(view[got:])
        except ConnectionError:
            return None
        if not count:
            return None
        got += count
    return buffer
