"""`tandem` and its servers, as a check starts and asks them."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from tandem.env import child_environment
from tandem.errors import TandemError
from tandem.firstlight.command import MODULE
from tandem.processes.child import ChildProcess
from tandem.processes.interpreter import module_command
from tandem.system.http_client import ServerClient
from tandem.system.state import process_state
from tandem.system.tools import output_of

START_S, END_S, POLL_S = 120.0, 30.0, 0.02
READY = re.compile(r"Tandem is ready: (http\S+)")


class Server:
    """A `tandem serve` that is ready."""

    def __init__(self, process: ChildProcess, url: str) -> None:
        self.process, self.url = process, url

    def health(self) -> dict[str, Any]:
        """/health, whatever it says."""
        found: dict[str, Any] = ServerClient(self.url).get_json("/health", timeout_s=20)
        return found

    def ranks(self) -> list[int]:
        """Process ids of its ranks; empty while there are none, or where one process does all."""
        return [int(rank["pid"]) for rank in self.health().get("ranks") or []]


@contextmanager
def serving(model: str, *options: str, start_s: float = START_S) -> Iterator[Server]:
    """A server on a free port of loopback; it is ended after. Raises TandemError when it does not become ready."""
    with tempfile.TemporaryFile() as log:
        words = ["serve", model, "--host", "127.0.0.1", "--port", "0", "--log-level", "WARNING", *options]
        process = ChildProcess(MODULE, msgspec.json.encode(words), env=child_environment(), name="tandem serve",
                               output=log.fileno())
        try:
            yield Server(process, _ready(process, log, start_s))
        finally:
            process.terminate()
            if not process.wait(END_S):
                process.kill()
                process.wait(END_S)


def _ready(process: ChildProcess, log: Any, start_s: float) -> str:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        text = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
        if found := READY.search(text):
            return found[1]
        if ended:
            lines = text.strip().splitlines() or ["it says nothing"]
            raise TandemError(f"the server {process.describe_exit()}: {lines[-1]}")
        time.sleep(POLL_S)
    raise TandemError(f"the server is not ready after {start_s:g} s")


def tandem(*words: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A command that ends by itself, with what it printed. Raises TandemError when it takes too long."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(module_command(MODULE), stdin=subprocess.PIPE, stdout=out, stderr=errors,
                                   env=child_environment(), start_new_session=True)
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(words) + b"\n")
        process.stdin.flush()
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TandemError(f"`tandem {words[0]}` has not ended after {timeout_s:g} s") from None
        finally:
            process.stdin.close()
            process.kill()
            process.wait()
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace") for file in (out, errors)]
    return subprocess.CompletedProcess(words, code, *texts)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait for it; False if it has not come true after so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def descendants(pid: int) -> set[int]:
    """Process ids of all that it has started, and those have."""
    parents: dict[int, int] = {}
    for line in (output_of(["ps", "-axo", "pid=,ppid="]) or "").splitlines():
        child, _, parent = line.strip().partition(" ")
        if child.isdigit() and parent.strip().isdigit():
            parents[int(child)] = int(parent)
    found: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


def gone(pid: int) -> bool:
    """The process has ended. One whose parent has not yet asked how is no process any more."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return process_state(pid) == "Z"
