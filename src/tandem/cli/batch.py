"""`tandem batch`: send a file of requests in OpenAI's batch format to a running server."""

from __future__ import annotations

import argparse
import json
import queue
import sys
import time
import urllib.error
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tandem.cli.address import find_server
from tandem.crash_guard import start_thread
from tandem.errors import UsageError
from tandem.printable import printable
from tandem.server.store.lines import Line, answer_line, parse_lines
from tandem.system.files import file_errors, read_regular
from tandem.system.http_client import ServerClient

AGAIN = frozenset({401, 408, 409, 429, 500, 502, 503, 504})
"""HTTP statuses that are not final answers: the request may succeed later, or (401) with another key."""
LONGEST_WAIT_S = 30.0
MOST = 4 << 30
"""Most bytes of a file of requests or of answers."""
Answer = tuple[int, bytes | str]
"""HTTP status and an answer line (bytes), or the reason of a failure (str)."""


@dataclass(frozen=True)
class Asking:
    """Server, and limits of each request to it."""

    server: ServerClient
    timeout_s: float
    retries: int


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return 1 if requests remain unanswered, else 0. Raises UsageError."""
    if arguments.concurrency < 1 or arguments.retries < 0 or arguments.timeout <= 0:
        raise UsageError("--concurrency and --timeout must be above 0, --retries at least 0")
    asking = Asking(find_server(arguments), arguments.timeout, arguments.retries)
    source, target = Path(arguments.input), Path(arguments.output)
    lines = read_requests(source)
    if target.exists() and source.samefile(target):
        raise UsageError(f"{target} is the file of the requests; give another one for the answers", param="output")
    done = answered(target, {line.custom_id for line in lines})
    todo = [line for line in lines if line.custom_id not in done]
    refused, lost = 0, ""
    quiet = not sys.stderr.isatty()
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with _opened(target) as out, Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        bar = progress.add_task("", total=len(lines), completed=len(done))
        missing = len(todo)
        for status, answer in _results(asking, todo, arguments.concurrency):
            if isinstance(answer, str):
                lost = answer
                continue
            out.write(answer)
            out.flush()
            refused += status >= 400
            missing -= 1
            progress.advance(bar)
    print(f"{len(lines) - missing} of {len(lines)} answered ({len(done)} before, {refused} refused now): {target}")
    if missing:
        print(printable(f"{missing} without an answer, for instance: {lost}. The same command tries them again."))
    return 1 if missing else 0


def read_requests(path: Path) -> list[Line]:
    """Read the requests of a file. Raises UsageError naming the faulty line."""
    lines: list[Line] = []
    for number, line in parse_lines(_bytes(path, "input").splitlines()):
        if isinstance(line, ValueError):
            raise UsageError(f"{path}, line {number}: {line}", param="input")
        lines.append(line)
    if not lines:
        raise UsageError(f"{path}: there are no requests in it", param="input")
    return lines


def _bytes(path: Path, param: str) -> bytes:
    with file_errors(f"{path} cannot be read", param=param):
        return read_regular(path, MOST)


def answered(path: Path, known: set[str]) -> set[str]:
    """Return the ids with answers in `path`; a truncated last line is removed. Raises UsageError for ids not in `known`."""
    if not path.exists():
        return set()
    raw = _bytes(path, "output")
    done = set()
    for number, text in enumerate(raw[: raw.rfind(b"\n") + 1].splitlines(), 1):
        try:
            done.add(json.loads(text)["custom_id"])
        except (ValueError, TypeError, LookupError):
            message = f"{path}, line {number}: not a batch's answer; give another file"
            raise UsageError(message, param="output") from None
    if strangers := done - known:
        raise UsageError(f"{path} holds answers to other requests ('{min(strangers)}'); give another file", param="output")
    if raw and not raw.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(raw.rfind(b"\n") + 1)
    return done


def _opened(target: Path) -> BinaryIO:
    with file_errors(f"{target} cannot be written", "name a file in a directory that you may write to", param="output"):
        return target.open("ab")


def _results(asking: Asking, todo: list[Line], concurrency: int) -> Iterator[Answer]:
    """Yield answers as they arrive, from `concurrency` threads.

    The threads are daemons, so that an interrupted command exits without waiting for them.
    """
    work: queue.SimpleQueue[Line] = queue.SimpleQueue()
    results: queue.SimpleQueue[Answer] = queue.SimpleQueue()
    for line in todo:
        work.put(line)

    def ask_all() -> None:
        while True:
            try:
                line = work.get_nowait()
            except queue.Empty:
                return
            results.put(_ask(asking, line))

    for _ in range(min(concurrency, len(todo))):
        start_thread(ask_all, name="requests")
    for _ in todo:
        yield results.get()


def _ask(asking: Asking, line: Line) -> Answer:
    """Return the answer to a request, retrying at most `retries` times with backoff."""
    why = ""
    for attempt in range(asking.retries + 1):
        wait = min(2.0**attempt, LONGEST_WAIT_S)
        try:
            status, headers, raw = _post(asking, line)
            if status not in AGAIN:
                json.loads(raw)
                return status, answer_line(f"batch_req_{uuid.uuid4().hex}", line.custom_id, status, raw)
            why = f"{line.custom_id}: HTTP {status}: {raw[:200].decode(errors='replace')}"
            if status == 401:
                return status, f"{why} (give --api-key-file, or set TANDEM_API_KEY or OPENAI_API_KEY)"
            after = headers.get("retry-after", "")
            wait = min(float(after), LONGEST_WAIT_S) if after.isdecimal() else wait
        except (OSError, HTTPException, ValueError) as error:
            why = f"{line.custom_id}: {error}"
        if attempt < asking.retries:
            time.sleep(wait)
    return 0, why


def _post(asking: Asking, line: Line) -> tuple[int, Message, bytes]:
    try:
        with asking.server.open(line.url, line.body, timeout_s=asking.timeout_s) as response:
            return response.status, response.headers, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()
