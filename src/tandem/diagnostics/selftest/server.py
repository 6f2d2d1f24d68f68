"""A `tandem serve` under test: start, requests, and its processes."""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

import msgspec

from tandem.bench.client import BenchRequest, Target, Timed, send
from tandem.crash_guard import start_thread
from tandem.diagnostics.selftest.check import Differs
from tandem.diagnostics.tasks import MODULE, CommandTask
from tandem.env import child_environment
from tandem.errors import TandemError
from tandem.json_types import JsonObject
from tandem.processes.child import ChildProcess
from tandem.system.http_client import ServerClient
from tandem.system.state import process_state
from tandem.system.tools import output_of

START_S, END_S, POLL_S = 120.0, 30.0, 0.02
WAIT_S, UNDER_WAY_S = 120.0, 30.0
LONGEST_S, RATED = 3600.0, 32
"""Seconds for answers to the longest prompts, and tokens by which `rates` measures."""
READY = re.compile(r"Tandem is ready: (http\S+)")


class Server:
    """A running `tandem serve`."""

    def __init__(self, process: ChildProcess, url: str) -> None:
        self.process, self.url = process, url

    def health(self) -> JsonObject:
        """Return the JSON body of /health."""
        return ServerClient(self.url).get_json("/health", timeout_s=20)

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks; empty while there are none, or in a single-process server."""
        return [int(rank["pid"]) for rank in self.health().get("ranks") or []]


@contextmanager
def serving(model: str, *options: str, start_s: float = START_S) -> Iterator[Server]:
    """Serve `model` on a free loopback port until the context ends. Raises TandemError if the server does not start."""
    with tempfile.TemporaryFile() as log:
        words = ["serve", model, "--host", "127.0.0.1", "--port", "0", "--log-level", "WARNING", *options]
        process = ChildProcess(
            MODULE,
            msgspec.json.encode(CommandTask(words=words)),
            env=child_environment(),
            name="tandem serve",
            output=log.fileno(),
        )
        try:
            yield Server(process, _ready(process, log, start_s))
        finally:
            process.terminate()
            if not process.wait(END_S):
                process.kill()
                process.wait(END_S)


def _ready(process: ChildProcess, log: IO[bytes], start_s: float) -> str:
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline:
        ended = process.poll() is not None
        text = os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")
        if ready := READY.search(text):
            return ready[1]
        if ended:
            lines = text.strip().splitlines() or ["it says nothing"]
            reason = next((line for line in reversed(lines) if line.startswith("tandem: ")), lines[-1])
            raise TandemError(f"the server {process.describe_exit()}: {reason}")
        time.sleep(POLL_S)
    raise TandemError(f"the server is not ready after {start_s:g} s")


@dataclass
class BackgroundAnswer:
    """An answer that a background thread receives."""

    thread: threading.Thread
    answer: Timed

    def under_way(self) -> bool:
        """True after the first text and before the end of the answer."""
        return bool(self.answer.pieces) and self.thread.is_alive()

    def done(self, wait_s: float = WAIT_S) -> Timed:
        """Wait for the whole answer. Raises TandemError if the request failed."""
        self.thread.join(wait_s + END_S)
        if self.thread.is_alive():
            raise TandemError(f"an answer has not come to an end within {wait_s:g} s")
        if self.answer.error:
            raise TandemError(f"a request failed: {self.answer.error}")
        return self.answer


def ask_in_background(server: Server, prompt: list[int], tokens: int, wait_s: float = WAIT_S) -> BackgroundAnswer:
    """Start a request for a greedy answer of `tokens` tokens; return at once."""
    usage = {"include_usage": True, "continuous_usage_stats": True}
    body = {"temperature": 0, "ignore_eos": True, "prompt": prompt, "stream_options": usage}
    target = Target(base_url=server.url, model="default", timeout_s=wait_s, body=body)
    job = BenchRequest("", tokens)
    answer = Timed(job, time.perf_counter())

    def run() -> None:
        asyncio.run(send(target, job, answer))

    return BackgroundAnswer(start_thread(run, name="asking", on_failure=lambda _: None), answer)


def ask(server: Server, prompt: list[int], tokens: int) -> Timed:
    """Return one greedy answer of `tokens` tokens. Raises TandemError."""
    return ask_in_background(server, prompt, tokens).done()


def rates(server: Server, prompts: Sequence[list[int]], most: int) -> tuple[float, float]:
    """Return tokens a second of simultaneous answers, and prompt tokens a second until the last prompt is computed.

    Answers end when each has `RATED` tokens more than at first, or `most`. Raises TandemError.
    """
    answers = [ask_in_background(server, prompt, most, LONGEST_S) for prompt in prompts]
    marks, least = [], 1
    for _ in range(2):
        until(lambda: all(one.answer.tokens >= least or not one.thread.is_alive() for one in answers), LONGEST_S)  # noqa: B023 - at once
        tokens = [one.answer.tokens for one in answers]
        marks.append((time.perf_counter(), sum(tokens)))
        least = min(tokens) + RATED
    for one in answers:
        one.answer.stopped = True
    began = min(one.done(LONGEST_S).sent for one in answers)
    (first, before), (last, after) = marks
    return (after - before) / (last - first), sum(map(len, prompts)) / (first - began)


def all_under_way(server: Server, prompts: Sequence[list[int]], tokens: int) -> list[BackgroundAnswer]:
    """Return answers that are all being generated at the same time; retries on a busy machine. Raises Differs."""
    deadline = time.monotonic() + UNDER_WAY_S
    while (left := deadline - time.monotonic()) > 0:
        answers = [ask_in_background(server, prompt, tokens) for prompt in prompts]
        until(lambda: all(one.answer.pieces or not one.thread.is_alive() for one in answers), left)  # noqa: B023 - at once
        if all(answer.under_way() for answer in answers):
            return answers
        for answer in answers:
            answer.done()
    raise Differs(f"{len(prompts)} answers under way at once, expected; not so within {UNDER_WAY_S:g} s, seen")


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return `length` token ids that exist in every vocabulary; equal arguments give equal ids."""
    return [3 + (seed * 7919 + 31 * i + i * i) % 253 for i in range(length)]


def seconds(began: float) -> float:
    """Return the seconds since `began`, a reading of time.monotonic(), rounded for reports."""
    return round(time.monotonic() - began, 2)


def until(condition: Callable[[], object], seconds: float) -> bool:
    """Wait until the condition holds; return False after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def descendants(pid: int) -> set[int]:
    """Return the process ids of all descendants of `pid`."""
    parents: dict[int, int] = {}
    for line in (output_of(["ps", "-axo", "pid=,ppid="]) or "").splitlines():
        child, _, parent = line.strip().partition(" ")
        if child.isdigit() and parent.strip().isdigit():
            parents[int(child)] = int(parent)
    pids: set[int] = set()
    while more := {child for child, parent in parents.items() if parent in {pid, *pids}} - pids:
        pids |= more
    return pids


def gone(pid: int) -> bool:
    """True if the process has exited, even as a zombie."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return process_state(pid) == "Z"
