"""Probe of a machine: `python -m tandem.diagnostics.doctor.probe` answers requests until its standard input closes."""

from __future__ import annotations

import contextlib
import socket
import statistics
import struct
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import msgspec

from tandem.crash_guard import own_process, start_thread
from tandem.descriptors import raise_limit
from tandem.diagnostics.doctor import probe_messages
from tandem.diagnostics.doctor.facts import gather
from tandem.diagnostics.doctor.probe_messages import Transferred
from tandem.diagnostics.tasks import RankTimes, run_ranks
from tandem.launchers.process_groups import free_ports, written_files
from tandem.processes.child import lines_of_parent
from tandem.system.privacy import connect_trouble, network_withheld

CONNECT_S = 4.0
STALL_S = 10.0
END_S = 0.2
"""Seconds that a request may go on after the end of the input."""
MESSAGE = 64
"""Size of a latency test's message in bytes."""
ROUNDS = 50
CHUNK = 1 << 18
COUNT = struct.Struct(">Q")


class Listener:
    """Server for test connections: checks the token, echoes `ROUNDS` messages, then counts bytes until end of stream."""

    def __init__(self, token: str) -> None:
        self._token = token.encode()
        self._socket = socket.create_server(("", 0), backlog=64)
        self.port: int = self._socket.getsockname()[1]
        start_thread(self._accept, name="listener")

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            start_thread(partial(self._serve, connection), name="transfer", on_failure=lambda _: None)

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(STALL_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if _receive(connection, len(self._token)) != self._token:
                return
            connection.sendall(self._token)
            for _ in range(ROUNDS):
                connection.sendall(_receive(connection, MESSAGE))
            count, buffer = 0, bytearray(CHUNK)
            while got := connection.recv_into(buffer):
                count += got
            connection.sendall(COUNT.pack(count))


def transfer(address: str, port: int, token: str, seconds: float) -> Transferred:
    """Connect to a `Listener` and measure for `seconds`; 0 only connects. Failures are returned in `error`."""
    try:
        with socket.create_connection((address, port), timeout=CONNECT_S) as connection:
            return _measure(connection, token.encode(), seconds)
    except OSError as error:
        words = connect_trouble(error, address) if network_withheld(error, address) else str(error)
        return Transferred(words or type(error).__name__)


def _measure(connection: socket.socket, token: bytes, seconds: float) -> Transferred:
    connection.settimeout(STALL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(token)
    if _receive(connection, len(token)) != token:
        return Transferred("something else answers on the test's port")
    if not seconds:
        return Transferred()
    rounds = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        connection.sendall(bytes(MESSAGE))
        _receive(connection, MESSAGE)
        rounds.append(time.perf_counter() - began)
    began, block = time.perf_counter(), bytes(CHUNK)
    while time.perf_counter() - began < seconds:
        connection.sendall(block)
    connection.shutdown(socket.SHUT_WR)
    count = COUNT.unpack(_receive(connection, COUNT.size))[0]
    return Transferred(None, statistics.median(rounds) / 2, count / (time.perf_counter() - began))


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        block = connection.recv(count - len(data))
        if not block:
            raise ConnectionError("the connection was closed")
        data += block
    return data


class Probe:
    """Request handler of a probe; keeps the `Listener` between requests."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def answer(self, request: probe_messages.Request) -> probe_messages.Reply:
        """Handle the request and return the reply. Raises OSError."""
        if isinstance(request, probe_messages.GatherFacts):
            return gather(request)
        if isinstance(request, probe_messages.TellTime):
            return probe_messages.Time(time.time())
        if isinstance(request, probe_messages.Listen):
            self._listener = self._listener or Listener(request.token)
            return probe_messages.ReservedPorts([self._listener.port])
        if isinstance(request, probe_messages.Reserve):
            return probe_messages.ReservedPorts(free_ports(request.count, ""))
        if isinstance(request, probe_messages.Transfer):
            return transfer(request.address, request.port, request.token, request.seconds)
        return run_rank(request)


def run_rank(request: probe_messages.RunRank) -> RankTimes:
    """Run one timed rank; `request.files` are written to disk and named by environment variables."""
    with tempfile.TemporaryDirectory(prefix="tandem-doctor-") as directory:
        variables = {**request.variables, **written_files(Path(directory), request.files)}
        [times] = run_ranks([request.task], [variables], request.timeout_s)
        return times


def main() -> int:
    """Answer requests from standard input until it ends, and not longer."""
    own_process()
    raise_limit()
    probe = Probe()
    for line in lines_of_parent(END_S):
        try:
            reply = probe.answer(msgspec.json.decode(line, type=probe_messages.Request))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            reply = probe_messages.ProbeError(f"{type(error).__name__}: {error}")
        sys.stdout.buffer.write(probe_messages.MARK + msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
