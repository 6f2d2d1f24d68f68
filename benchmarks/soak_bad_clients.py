"""Clients that mean no good, for the soak: each does one bad thing after the other; half of them leave amid it.

They are a process of their own (so that their own work does not hold up who measures), which prints a line for each
deed. When it is killed all of them are gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

CHAT = "/v1/chat/completions"
PAUSE_S = 2.0
"""Between two bad deeds of one client."""


def _post(path: str, body: bytes, length: int | None = None) -> bytes:
    return (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n").encode() + body


def _heavy(rng: random.Random) -> bytes:
    """A body below the limit that is dear to read, or to act on."""
    kind = rng.randrange(6)
    if kind == 0:
        return _post(CHAT, b'{"model":"default","messages":[' + b"[1]," * 6_000_000 + b"1]}")
    if kind == 1:
        return _post("/v1/completions", b'{"model":"default","prompt":[' + b"7," * 1_500_000 + b"7]}")
    if kind == 2:
        words = json.dumps("a " * (10 << 20))
        return _post(CHAT, f'{{"model":"default","messages":[{{"role":"user","content":{words}}}]}}'.encode())
    if kind == 3:
        return _post("/v1/completions", json.dumps({"model": "default", "prompt": "a", "max_tokens": 8,
                                                    "structured_outputs": {"regex": "a{1000000}"}}).encode())
    if kind == 4:
        return _post("/tokenize", json.dumps({"model": "default", "prompt": "\u00e9 x" * (2 << 20)}).encode())
    biases = ",".join(f'"{number}":1' for number in range(100_000))
    return _post("/v1/completions", f'{{"model":"default","prompt":"a","logit_bias":{{{biases}}}}}'.encode())


class BadClients:
    """The process of the bad clients. A context manager: they are there inside, and gone after."""

    def __init__(self, port: int, seed: int, heavy: int, log: Path) -> None:
        self._command = [sys.executable, __file__, str(port), "--seed", str(seed), "--heavy", str(heavy)]
        self._log = log

    def __enter__(self) -> Self:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=log)
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()

    @property
    def deeds(self) -> int:
        """Of all processes that have written to this log."""
        return len(self._log.read_bytes().splitlines()) if self._log.exists() else 0


class _Deeds:
    """Heavy bodies, slow readers, dripped headers."""

    def __init__(self, port: int) -> None:
        self._port = port

    def run(self, kind: str, rng: random.Random) -> None:
        deed: Callable[[random.Random], str] = getattr(self, kind)
        while True:
            time.sleep(PAUSE_S * rng.random())
            began, outcome = time.monotonic(), "broken"
            with contextlib.suppress(OSError):
                outcome = deed(rng)
            print(f"{time.strftime('%X')} {kind} {time.monotonic() - began:.1f} s: {outcome}", flush=True)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=60)

    def heavy(self, rng: random.Random) -> str:
        body = _heavy(rng)
        with self._connect() as one:
            if rng.random() < 0.5:
                one.sendall(body[:int(len(body) * rng.random())])
                return "left in the body"
            one.sendall(body)
            if rng.random() < 0.5:
                time.sleep(rng.random())
                return "left"
            got = one.recv(4096).split(b"\r\n", 1)[0].decode(errors="replace")
        time.sleep(5 * rng.random())
        return got

    def slow(self, rng: random.Random) -> str:
        body = json.dumps({"model": "default", "prompt": [9] * 20, "max_tokens": 200, "stream": True,
                           "ignore_eos": True, "temperature": 0}).encode()
        with self._connect() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.sendall(_post("/v1/completions", body))
            for _ in range(rng.randrange(2, 30)):
                if not one.recv(64):
                    return "ended"
                time.sleep(0.5)
        return "left"

    def drip(self, rng: random.Random) -> str:
        with self._connect() as one:
            for byte in _post("/v1/completions", b"{}", 4096)[:rng.randrange(10, 90)]:
                one.send(bytes([byte]))
                time.sleep(0.5)
        return "left"


def main() -> None:
    """Until standard input ends, or the process does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--heavy", type=int, default=1, help="how many send heavy bodies (default: %(default)s)")
    parser.add_argument("--slow", type=int, default=3, help="how many read slowly (default: %(default)s)")
    parser.add_argument("--drip", type=int, default=8, help="how many drip headers (default: %(default)s)")
    args = parser.parse_args()
    os.nice(10)  # bad clients are on machines of their own: what it costs them is not to be the server's
    kinds = ["heavy"] * args.heavy + ["slow"] * args.slow + ["drip"] * args.drip
    for number, kind in enumerate(kinds):
        rng = random.Random(args.seed * 1000 + number)
        threading.Thread(target=_Deeds(args.port).run, args=(kind, rng), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
