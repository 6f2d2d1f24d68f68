"""`tandem serve` as a person starts it, for tests over HTTP: with an address, clients, and its processes."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI

PATIENCE_S = 240.0
"""For anything that must come to pass; a busy machine is slow, and waiting for what comes costs nothing."""
READY = re.compile(r"Tandem is ready: (\S+)")
TLS = ssl.create_default_context()
"""Made once: a client of httpx that makes its own takes as long for it as the server for twenty tokens."""


class Server:
    """A running `tandem serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str, key: str = "none") -> None:
        self.process, self.url = process, url
        self.headers = {"Authorization": f"Bearer {key}"}
        self.client = OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    @property
    def port(self) -> str:
        return self.url.rsplit(":", 1)[1]

    def get(self, path: str) -> Any:
        return httpx.get(self.url + path, timeout=PATIENCE_S, headers=self.headers, verify=TLS).json()

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=PATIENCE_S, headers=self.headers, verify=TLS).text

    def command(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Another `tandem` command."""
        return subprocess.run(
            [sys.executable, "-m", "tandem", *arguments], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    def family(self) -> list[psutil.Process]:
        """All processes below its first one."""
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []

    def api(self) -> psutil.Process:
        """The process that serves HTTP."""
        return api_of(psutil.Process(self.process.pid))


def api_of(server: psutil.Process) -> psutil.Process:
    """The process that serves HTTP, among those that this one has started."""
    [api] = [one for one in server.children(recursive=True) if {"tandem.cli.processes", "api"} <= set(one.cmdline())]
    return api


class Call:
    """One HTTP request in a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> None:
        self.headers = headers
        self.chunks = 0
        self.result: dict[str, Any] = {}
        self.error: Exception | None = None
        self.status = 0
        self._url, self._body = url, {"model": "default", "ignore_eos": True, **body}
        if body.get("stream"):
            self._body["stream_options"] = {"include_usage": True}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            with httpx.Client(timeout=PATIENCE_S, verify=TLS, headers=self.headers) as client:
                if self._body.get("stream"):
                    self._stream(client)
                else:
                    reply = client.post(f"{self._url}/v1/completions", json=self._body)
                    self.status = reply.status_code
                    if reply.status_code == 200:
                        whole = reply.json()
                        self._add(whole)
                        self.result["usage"] = whole["usage"]
                    else:
                        self.result = reply.json()
        except (httpx.HTTPError, ValueError) as error:
            self.error = error

    def _stream(self, client: httpx.Client) -> None:
        with client.stream("POST", f"{self._url}/v1/completions", json=self._body) as reply:
            self.status = reply.status_code
            for line in reply.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    self.result["done"] = True
                    break
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    self.result["error"] = chunk["error"]
                elif chunk.get("choices"):
                    self._add(chunk)
                if chunk.get("usage"):
                    self.result["usage"] = chunk["usage"]

    def _add(self, reply: dict[str, Any]) -> None:
        self.chunks += 1
        [choice] = reply["choices"]
        self.result["text"] = self.result.get("text", "") + choice["text"]
        if choice.get("logprobs"):
            self.result.setdefault("logprobs", []).extend(choice["logprobs"]["token_logprobs"])
        if choice["finish_reason"]:
            self.result["finish_reason"] = choice["finish_reason"]

    @property
    def running(self) -> bool:
        """No answer yet, or not all of it."""
        return self._thread.is_alive()

    def join(self) -> Call:
        """Wait for its end."""
        self._thread.join(PATIENCE_S)
        assert not self.running, f"no end of {self._body}"
        return self


def start(*arguments: str | Path, errors: Any = subprocess.DEVNULL, **variables: str) -> subprocess.Popen[str]:
    """The command alone, on a free port."""
    return subprocess.Popen(
        [sys.executable, "-m", "tandem", "serve", *arguments, "--port", "0"],
        text=True,
        stdout=subprocess.PIPE,
        stderr=errors,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", **variables},
    )


def address(process: subprocess.Popen[str], log: Path | None = None) -> str:
    """Where it listens, once it is ready."""
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
    line = process.stdout.readline() if readable else ""
    ready = READY.search(line)
    assert ready, f"not ready: {line!r} {log.read_text()[-4000:] if log else ''}"
    return ready[1]


def end(process: subprocess.Popen[str], how: signal.Signals = signal.SIGTERM) -> None:
    """Ask it to end, and see to it."""
    process.send_signal(how)
    try:
        process.communicate(timeout=PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()


def assert_gone(family: Sequence[psutil.Process]) -> None:
    """These have ended, or do."""
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert not alive, f"outlived the server: {alive}"


@contextmanager
def serving(
    *arguments: str | Path, kind: type[Any] = Server, how: signal.Signals = signal.SIGTERM, **variables: str
) -> Iterator[Any]:
    """A server on a free port, as `kind` shows it; it is ended by `how`, and nothing may be left of it."""
    process, family = start(*arguments, **variables), list[psutil.Process]()
    try:
        server = kind(process, address(process))
        family = server.family()
        yield server
        family = list({*family, *server.family()})
    finally:
        end(process, how)
        assert_gone(family)


@contextmanager
def served(*arguments: str | Path) -> Iterator[str]:
    """The address alone."""
    with serving(*arguments) as server:
        yield server.url


def wait_until(condition: Callable[[], Any], what: str = "", seconds: float = PATIENCE_S) -> None:
    """Until `condition` holds."""
    deadline = time.monotonic() + seconds
    while not holds(condition):
        assert time.monotonic() < deadline, f"timed out: {what}"


def holds(condition: Callable[[], Any]) -> bool:
    """Ask; where it does not hold, leave the processors alone for three times as long as that took."""
    asked = time.monotonic()
    if condition():
        return True
    time.sleep(min(max(0.02, 3 * (time.monotonic() - asked)), 0.5))
    return False


def assert_idle(family: Sequence[psutil.Process]) -> None:
    """These processes have nothing to do: soon there are 2 s in which they use 0.2 s of a processor, all together."""
    for _ in range(20):
        before = {one.pid: sum(one.cpu_times()[:2]) for one in family}
        time.sleep(2.0)
        spent = {one.pid: sum(one.cpu_times()[:2]) - before[one.pid] for one in family}
        if sum(spent.values()) < 0.2:
            return
    raise AssertionError(f"seconds of a processor in 2 s of idleness: {spent}")
