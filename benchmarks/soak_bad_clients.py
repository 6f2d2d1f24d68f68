"""Bad neighbours of a storm: clients that each do one bad thing after the other; many leave amid it.

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
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PAUSE_S = 2.0
"""Longest pause between two bad deeds of one client."""
KINDS = {"heavy": 1, "slow": 3, "drip": 8, "leave": 2, "half": 2, "bombs": 1, "idle": 1, "garbage": 1}
"""Clients of each kind, unless told otherwise."""
CROWD = 20
"""Connections that one client of `half` or `idle` has at once."""


def _post(path: str, body: bytes, length: int | None = None) -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    ).encode() + body


def _ask(path: str, **fields: object) -> bytes:
    return _post(path, json.dumps({"model": "default", **fields}).encode())


def _heavy(rng: random.Random) -> bytes:
    """Return a request whose body is below the limit, and dear to read."""
    kind = rng.randrange(5)
    if kind == 0:
        return _post(CHAT, b'{"model":"default","messages":[' + b"[1]," * 6_000_000 + b"1]}")
    if kind == 1:
        return _post(TEXT, b'{"model":"default","prompt":[' + b"7," * 1_500_000 + b"7]}")
    if kind == 2:
        words = json.dumps("a " * (10 << 20))
        return _post(CHAT, f'{{"model":"default","messages":[{{"role":"user","content":{words}}}]}}'.encode())
    if kind == 3:
        return _ask("/tokenize", prompt="\u00e9 x" * (2 << 20))
    biases = ",".join(f'"{number}":1' for number in range(100_000))
    return _post(TEXT, f'{{"model":"default","prompt":"a","logit_bias":{{{biases}}}}}'.encode())


def _bomb(rng: random.Random) -> bytes:
    """Return a small request that is dear to act on: grammars, expressions, schemas, nesting, many texts."""

    def nested(depth: int) -> dict[str, object]:
        return {"type": "object", "properties": {"a": nested(depth - 1)}} if depth else {"type": "string"}

    kind = rng.randrange(6)
    if kind == 0:
        return _ask(TEXT, prompt="a", max_tokens=8, structured_outputs={"regex": "a{1000000}"})
    if kind == 1:
        return _ask(TEXT, prompt="a", max_tokens=8, structured_outputs={"regex": "(a?){2000}(a|aa)*" * 9})
    if kind == 2:
        rules = "\n".join(f'r{n}: r{n + 1} r{n + 1} | r{n + 1} "x"' for n in range(60))
        return _ask(TEXT, prompt="a", max_tokens=8, structured_outputs={"grammar": f'start: r0\n{rules}\nr60: "y"'})
    if kind == 3:
        return _ask(TEXT, prompt="a", max_tokens=8, structured_outputs={"json": nested(300)})
    if kind == 4:
        return _post(CHAT, b'{"model":"default","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    return _ask("/v1/embeddings", input=["one red sea"] * 500)


GARBAGE = (
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200),
    b"\0" * 4096,
    b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
    b"GET  / \n\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /v1/requests/..%2f..%2fetc%00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
)


class BadClients:
    """The process of the bad clients. A context manager: they are there inside, and gone after."""

    def __init__(self, port: int, seed: str, kinds: Mapping[str, int], log: Path) -> None:
        """`kinds`: how many clients of each."""
        self._command = [
            sys.executable,
            __file__,
            str(port),
            "--seed",
            seed,
            *(f"{kind}={count}" for kind, count in kinds.items()),
        ]
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
        """Deeds of all processes that have written to this log."""
        return len(self._log.read_bytes().splitlines()) if self._log.exists() else 0


class _Deeds:
    """One method for each of `KINDS`; returns what came of it."""

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
                one.sendall(body[: int(len(body) * rng.random())])
                return "left in the body"
            one.sendall(body)
            if rng.random() < 0.5:
                time.sleep(rng.random())
                return "left"
            got = _status(one)
        time.sleep(5 * rng.random())
        return got

    def bombs(self, rng: random.Random) -> str:
        with self._connect() as one:
            one.sendall(_bomb(rng))
            return "left" if rng.random() < 0.2 else _status(one)

    def slow(self, rng: random.Random) -> str:
        with self._connect() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.sendall(_stream(rng, 200))
            for _ in range(rng.randrange(2, 30)):
                if not one.recv(64):
                    return "ended"
                time.sleep(0.5)
        return "left"

    def leave(self, rng: random.Random) -> str:
        with self._connect() as one:
            one.sendall(_stream(rng, 300))
            time.sleep(1.2 * rng.random())
            if rng.random() < 0.7:
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return "reset"
        return "left"

    def drip(self, rng: random.Random) -> str:
        with self._connect() as one:
            for byte in _post(TEXT, b"{}", 4096)[: rng.randrange(10, 90)]:
                one.send(bytes([byte]))
                time.sleep(0.5)
        return "left"

    def half(self, rng: random.Random) -> str:
        request = _ask(TEXT, prompt="a", max_tokens=4)
        return self._crowd(rng, lambda: request[: rng.randrange(1, len(request))])

    def idle(self, rng: random.Random) -> str:
        return self._crowd(rng, lambda: b"")

    def garbage(self, rng: random.Random) -> str:
        with self._connect() as one:
            one.sendall(rng.choice(GARBAGE))
            one.settimeout(5)
            return _status(one)

    def _crowd(self, rng: random.Random, first: Callable[[], bytes]) -> str:
        """Connections that send no more than their first bytes, for a while."""
        with contextlib.ExitStack() as stack:
            for _ in range(CROWD):
                stack.enter_context(one := self._connect())
                one.sendall(first())
            time.sleep(10 * rng.random())
        return f"left {CROWD}"


def _stream(rng: random.Random, tokens: int) -> bytes:
    return _ask(
        TEXT, prompt=[rng.randrange(10, 500) for _ in range(20)], max_tokens=tokens, stream=True, ignore_eos=True, temperature=0
    )


def _status(one: socket.socket) -> str:
    return one.recv(4096).split(b"\r\n", 1)[0].decode(errors="replace")


def main() -> None:
    """Run until standard input ends, or the process does."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("kinds", nargs="+", metavar="KIND=N", help=f"clients of a kind: {', '.join(KINDS)}")
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    os.nice(10)  # bad clients are on machines of their own: what it costs them is not to be the server's
    for kind, count in (text.split("=") for text in args.kinds):
        for number in range(int(count)):
            rng = random.Random(f"{args.seed}/{kind}/{number}")
            threading.Thread(target=_Deeds(args.port).run, args=(kind, rng), daemon=True).start()
    sys.stdin.read()


if __name__ == "__main__":
    main()
