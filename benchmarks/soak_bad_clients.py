"""Clients that mean no good, for the soak: each does one bad thing after the other until it is told to stop."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Callable

CHAT = "/v1/chat/completions"
PAUSE_S = 2.0
"""Between two bad deeds of one client."""


def _post(path: str, body: bytes, length: int | None = None) -> bytes:
    return (f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body) if length is None else length}\r\n\r\n").encode() + body


def _heavy(rng: random.Random) -> bytes:
    """A body below the limit that is dear to read."""
    kind = rng.randrange(4)
    if kind == 0:
        return _post(CHAT, b'{"model":"default","messages":[' + b"[1]," * 6_000_000 + b"1]}")
    if kind == 1:
        return _post("/v1/completions", b'{"model":"default","prompt":[' + b"7," * 1_500_000 + b"7]}")
    if kind == 2:
        words = json.dumps("a " * (10 << 20))
        return _post(CHAT, f'{{"model":"default","messages":[{{"role":"user","content":{words}}}]}}'.encode())
    biases = ",".join(f'"{number}":1' for number in range(100_000))
    return _post("/v1/completions", f'{{"model":"default","prompt":"a","logit_bias":{{{biases}}}}}'.encode())


class BadClients:
    """Heavy bodies, slow readers, dripped headers; half of them leave in the middle."""

    def __init__(self, port: int, seed: int) -> None:
        self._port, self._seed = port, seed
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []
        self.deeds = 0

    def start(self, heavy: int = 1, slow: int = 3, drips: int = 8) -> None:
        """So many of each kind."""
        kinds: list[Callable[[random.Random], None]] = [
            *[self._send_heavy] * heavy, *[self._read_slowly] * slow, *[self._drip] * drips]
        for number, deed in enumerate(kinds):
            drawn = random.Random(self._seed * 1000 + number)
            thread = threading.Thread(target=self._run, args=(deed, drawn), daemon=True)
            self._threads.append(thread)
            thread.start()

    def end(self) -> None:
        """All leave."""
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, deed: Callable[[random.Random], None], rng: random.Random) -> None:
        while not self._stop.wait(PAUSE_S * rng.random()):
            self.deeds += 1
            with contextlib.suppress(OSError):
                deed(rng)

    def _connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self._port), timeout=30)

    def _send_heavy(self, rng: random.Random) -> None:
        body = _heavy(rng)
        with self._connect() as one:
            if rng.random() < 0.5:
                one.sendall(body[:int(len(body) * rng.random())])
                return
            one.sendall(body)
            one.recv(4096)
        self._stop.wait(10 * rng.random())

    def _read_slowly(self, rng: random.Random) -> None:
        body = json.dumps({"model": "default", "prompt": [9] * 20, "max_tokens": 200, "stream": True,
                           "ignore_eos": True, "temperature": 0}).encode()
        with self._connect() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            one.sendall(_post("/v1/completions", body))
            for _ in range(rng.randrange(2, 30)):
                if not one.recv(64) or self._stop.wait(0.5):
                    return

    def _drip(self, rng: random.Random) -> None:
        with self._connect() as one:
            for byte in _post("/v1/completions", b"{}", 4096)[:rng.randrange(10, 90)]:
                one.send(bytes([byte]))
                if self._stop.wait(0.5):
                    return
