"""`tandem up`, `down` and `logs`: a server in the background."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from typing import Any

from rich.console import Console

from tandem.cli.background import MODULE
from tandem.cli.processes import prepared
from tandem.cli.serve import GRACE_S, checked
from tandem.cli.status import Look, look_at
from tandem.config.loading import to_json
from tandem.env import variables
from tandem.errors import UsageError
from tandem.processes.interpreter import module_command
from tandem.supervision.record import Background

POLL_S = 0.2
TAIL = 20
"""Lines of the log to show when a server did not come up."""


def run_up(arguments: argparse.Namespace) -> int:
    """Start a server and wait until it is ready. Raises UsageError."""
    settings = checked(prepared(arguments))
    place = Background(arguments.name)
    lock = place.lock()
    place.forget()
    with place.fresh_log() as log:
        # It runs in a session of its own, so that neither ctrl-C nor the terminal's end reaches it.
        process = subprocess.Popen(module_command(MODULE, place.name, str(lock)), stdin=subprocess.PIPE,
                                   stdout=log, stderr=log, pass_fds=[lock], start_new_session=True,
                                   env={**variables(), "PYTHONUNBUFFERED": "1"}, cwd=os.getcwd())
    os.close(lock)
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(to_json(settings) + b"\n")
    if arguments.no_wait:
        print(f"{place.name} is starting (process {process.pid}); `tandem status` shows how far it is")
        return 0
    try:
        return _wait(place, process)
    except KeyboardInterrupt:
        print(f"\n{place.name} goes on starting in the background; `tandem down` ends it", file=sys.stderr)
        return 130


def _wait(place: Background, process: subprocess.Popen[bytes]) -> int:
    waiting: Any = Console(stderr=True).status("starting") if sys.stderr.isatty() else nullcontext()
    with waiting as display:
        while (code := process.poll()) is None:
            seen = look_at(place, 0.0)
            if seen.ready:
                print(f"{place.name} is ready: {seen.address} (model {seen.model}); its log is {place.log}")
                return 0
            if display is not None and seen.detail:
                display.update(seen.detail)
            time.sleep(POLL_S)
    sys.stderr.writelines(_tail(place, TAIL))
    print(f"tandem: {place.name} did not come up (exit code {code}); its log is {place.log}", file=sys.stderr)
    return code if code > 0 else 3


def run_down(arguments: argparse.Namespace) -> int:
    """End a server: it finishes what it has (or with --now drops it). Raises UsageError."""
    place = Background(arguments.name)
    if not place.runs():
        place.forget()
        print(f"{place.name} does not run")
        return 0
    seen: Look = look_at(place, 0.0)
    record = place.record()
    if record is None:
        raise UsageError(f"{place.name} has just been started; try again in a moment")
    os.kill(record.pid, signal.SIGTERM)
    if arguments.now:
        time.sleep(POLL_S)
        with contextlib.suppress(ProcessLookupError):
            os.kill(record.pid, signal.SIGTERM)
    elif seen.running:
        print(f"{seen.running} request(s) get {record.drain_timeout:g} s to finish (--now drops them)", flush=True)
    deadline = time.monotonic() + 2 * (record.drain_timeout + 2 * GRACE_S)
    while place.runs():
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(record.pid, signal.SIGKILL)  # its children hold a lifeline, and go with it
        time.sleep(POLL_S / 2)
    place.forget()
    print(f"{place.name} has ended")
    return 0


def run_logs(arguments: argparse.Namespace) -> int:
    """Print the end of a server's log, and with --follow what comes, until the server ends. Raises UsageError."""
    place = Background(arguments.name)
    if not place.log.exists():
        raise UsageError(f"{place.name} has no log: `tandem up` has not started a server of that name")
    sys.stdout.writelines(_tail(place, arguments.lines))
    if not arguments.follow:
        return 0
    with place.log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        ended = False
        while not ended:
            ended = not place.runs()  # looked at before the last read, so that nothing is missed
            if os.fstat(file.fileno()).st_size < file.tell():
                file.seek(0)  # the server has begun its log anew
            sys.stdout.write(file.read().decode(errors="replace"))
            sys.stdout.flush()
            time.sleep(POLL_S)
    return 0


def _tail(place: Background, count: int) -> list[str]:
    """The last lines of the log."""
    with place.log.open(errors="replace") as file:
        lines = file.readlines()
    return lines[-count:] if count else []
