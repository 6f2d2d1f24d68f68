"""The doctor's end on a machine: `python -m tandem.doctor.probe` answers requests until its standard input closes."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import msgspec

from tandem.borders import start_thread
from tandem.descriptors import raise_limit
from tandem.doctor import messages
from tandem.doctor.facts import gather
from tandem.doctor.transfer import Listener, transfer
from tandem.env import child_environment
from tandem.launchers.worlds import free_ports, written_files
from tandem.processes.interpreter import module_command

COLLECTIVE = "tandem.doctor.collective"
MEASURING = "tandem.bench.comm_rank"
LATE = "late"
TAIL = 65536
"""Bytes of what the test group has complained about that are read, from the end."""


class Probe:
    """Answers one request after the other."""

    def __init__(self) -> None:
        self._listener: Listener | None = None

    def answer(self, request: messages.Request) -> messages.Reply:
        """The reply. Raises OSError."""
        if isinstance(request, messages.GatherFacts):
            return gather(request)
        if isinstance(request, messages.TellTime):
            return messages.Time(time.time())
        if isinstance(request, messages.Listen):
            self._listener = self._listener or Listener(request.token)
            return messages.ReservedPorts([self._listener.port])
        if isinstance(request, messages.Reserve):
            return messages.ReservedPorts(free_ports(request.count, ""))
        if isinstance(request, messages.Transfer):
            return transfer(request.address, request.port, request.token, request.seconds)
        return run_rank(request) if isinstance(request, messages.RunRank) else collect(request)


def collect(request: messages.Collect) -> messages.Collected:
    """Run one rank of the test group."""
    error, line = run_module(COLLECTIVE, request.backend, request.variables, request.files, request.timeout_s)
    return messages.Collected(f"no sum within {request.timeout_s:g} s" if error == LATE else error,
                     json.loads(line) if error is None else {})


def run_rank(request: messages.RunRank) -> messages.RankRan:
    """Run one rank that measures."""
    error, line = run_module(MEASURING, request.payload, request.variables, request.files, request.timeout_s)
    late = f"has not ended within {request.timeout_s:g} s (--timeout)"
    return messages.RankRan(late if error == LATE else error, line)


def run_module(module: str, payload: str, given: Mapping[str, str], files: Mapping[str, str], timeout_s: float
               ) -> tuple[str | None, str]:  # fmt: skip
    """Run a module in a process of its own, which is killed when its time is up (`LATE`): why it failed, if it did, and
    the last line that it printed."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="tandem-doctor-"))
        variables = {**given, **written_files(Path(directory), files)}
        complaints = stack.enter_context(tempfile.TemporaryFile())  # a pipe that nobody reads fills, and stops it
        process = subprocess.Popen(module_command(module), env=child_environment(variables),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints)
        assert process.stdin is not None
        process.stdin.write(payload.encode() + b"\n")
        process.stdin.flush()
        timer = threading.Timer(timeout_s, process.kill)
        timer.start()
        assert process.stdout is not None
        with process.stdin, process.stdout:  # its lifeline stays open until it has ended
            output, code = process.stdout.read(), process.wait()
        complaints.seek(max(complaints.seek(0, os.SEEK_END) - TAIL, 0))
        errors = complaints.read()
        late = not timer.is_alive()
        timer.cancel()
    if code == 0:
        return None, output.decode().splitlines()[-1]  # NCCL may have written before it
    lines = errors.decode(errors="replace").strip().splitlines()
    return LATE if late else lines[-1] if lines else f"exit code {code}", ""


def main() -> int:
    """Serve standard input. A thread reads it, so that its end is seen while a test runs."""
    raise_limit()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin.buffer:
            requests.put(line)
        os._exit(0)

    start_thread(read, name="requests", on_failure=lambda _: os._exit(1))
    probe = Probe()
    while True:
        try:
            reply = probe.answer(msgspec.json.decode(requests.get(), type=messages.Request))
        except (OSError, msgspec.MsgspecError, ValueError) as error:
            reply = messages.ProbeError(f"{type(error).__name__}: {error}")
        sys.stdout.buffer.write(messages.MARK + msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(main())
