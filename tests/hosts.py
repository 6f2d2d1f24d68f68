"""A server on one of several machines (netns.py) with its ranks on others, and what is left of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from netns import Machines
from served import holds

READY = re.compile(r"Tandem is ready: (\S+)")
START_S = 240.0


def eventually(condition: Callable[[], object], seconds: float = 240, what: object = "") -> float:
    """Wait until `condition` holds; how long that took."""
    began = time.monotonic()
    while not holds(condition):
        assert time.monotonic() - began < seconds, f"not within {seconds} s: {what() if callable(what) else what}"
    return time.monotonic() - began


class Served:
    """A `tandem serve` on machine `head`."""

    def __init__(self, machines: Machines, head: str, arguments: Sequence[str]) -> None:
        self.machines = machines
        self.head = head
        self._log = machines[head].home / f"serve-{time.monotonic_ns()}.log"
        address = machines[head].address
        with self._log.open("w") as file:
            self.process = machines.start(
                head,
                ["tandem", "serve", *arguments, "--host", address, "--port", "8000"],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
            )
        self.url = f"http://{address}:8000"

    @property
    def log(self) -> str:
        """What it has written."""
        return self._log.read_text()

    def wait_ready(self) -> None:
        """Until it can serve."""
        eventually(lambda: READY.search(self.log) or self.process.poll() is not None, START_S, lambda: self.log)
        assert READY.search(self.log), self.log

    def wait_for(self, words: str, seconds: float = START_S) -> None:
        """Until it has written `words` (a pattern)."""
        eventually(lambda: re.search(words, self.log), seconds, lambda: f"{words}\n{self.log}")

    def complete(self, tokens: int = 12, **fields: Any) -> str:
        """A greedy completion."""
        body = {
            "model": "default",
            "prompt": [5, 9, 70, 3, 42],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **fields,
        }
        answer = httpx.post(f"{self.url}/v1/completions", json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def stop(self, number: int = signal.SIGINT) -> int:
        """Signal it, and its exit code."""
        self.machines.signal(self.process, number)
        return self.process.wait(240)


def left_over(machines: Machines) -> dict[str, list[str]]:
    """Processes of ours, by machine."""
    found = {
        name: [line for line in machines.processes(name).values() if "tandem" in line or line.startswith("ssh ")]
        for name in machines.names
    }
    return {name: lines for name, lines in found.items() if lines}


@contextmanager
def serving(machines: Machines, *arguments: str, head: str = "h0", ready: bool = True) -> Iterator[Served]:
    """A server that is ended afterwards, with nothing left on any machine."""
    server = Served(machines, head, arguments)
    try:
        if ready:
            server.wait_ready()
        yield server
        if server.process.poll() is None:
            server.stop(signal.SIGTERM)
        eventually(lambda: not left_over(machines), what=lambda: f"{left_over(machines)}\n{server.log}")
    finally:
        for name in machines.names:
            for pid in [pid for pid, line in machines.processes(name).items() if "tandem" in line]:
                machines.run(name, ["sh", "-c", f"kill -9 {pid} 2>/dev/null || true"], check=False)
        server.process.kill()


def hostfile(machines: Machines, hosts: Sequence[Any], head: str = "h0", **top: Any) -> str:
    """A hostfile with the named machines; its path."""
    entries = [{"ssh": one, "ips": [machines[one].address]} if isinstance(one, str) else one for one in hosts]
    path: Path = machines[head].home / "hosts.json"
    path.write_text(json.dumps({"hosts": entries, **top} if top else entries))
    return str(path)
