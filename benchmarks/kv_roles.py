"""Gaps of streams that run while long prompts come: replicas with roles, and the same cores without."""

from __future__ import annotations

import argparse
import contextlib
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import httpx
from harness import Server, table, tandem_server
from kv_machines import Machines

SPLIT = "prefill,decode"
MIXED = {"pp": "one rank group of two ranks", "one": "one rank with two threads", "dp": "two replicas for everything"}
"""What the split is compared with."""
WARM = 600
"""Tokens of a prompt after which all code has run, and paces are known."""
ANSWER = 7000
"""Tokens of a running stream, unless --answer says otherwise: so many that it outlasts the prompts."""
ENOUGH = 20
"""Tokens of each stream before prompts come."""


@dataclass
class Stream:
    """A streamed completion: when each of its tokens came."""

    times: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def read(self, port: int, prompt: list[int], max_tokens: int, **fields: object) -> None:
        """Until it ends, or `over`."""
        body = {
            "model": "default",
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
            **fields,
        }
        with (
            httpx.Client(timeout=900) as client,
            client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as reply,
        ):
            if reply.status_code != 200:
                raise SystemExit(f"refused: {reply.read().decode()}")
            for line in reply.iter_lines():
                if self.over.is_set():
                    return
                if line.startswith("data: {"):
                    self.times.append(time.monotonic())

    def gaps(self, since: float) -> list[float]:
        """Seconds between its tokens from then on."""
        return [later - earlier for earlier, later in pairwise(self.times) if later > since]


@contextlib.contextmanager
def place(given: argparse.Namespace, side: str, **flags: object) -> Iterator[Server]:
    """A server with roles (`SPLIT`), or as `MIXED` says, on one machine or two."""
    flags = {"dequantize": "auto", **flags, **({"roles": SPLIT} if side == SPLIT else {})}
    if given.apart != "no" and side != "one":
        with (
            Machines(given.directory, network=given.apart == "machines", pin=given.pin) as machines,
            machines.serve(given.model, replicas=1 if side == "pp" else 2, **flags) as server,
        ):
            yield server
        return
    layout = {"pp": {"pipeline_parallel_size": 2}, "one": {"executor": "cluster"}}.get(side, {"data_parallel_size": 2})
    with (
        tempfile.TemporaryDirectory(prefix="tandem-kv-", dir=given.directory) as directory,
        tandem_server(Path(given.model), 2 if side == "one" else 1, kv_disk=directory, **layout, **flags) as server,
    ):
        yield server


def disturbed(given: argparse.Namespace, length: int, side: str) -> dict[str, float]:
    """Gaps of running streams while prompts of so many tokens come one after the other, and how long each took to its
    first token."""
    rng = random.Random(length)

    def prompt(count: int) -> list[int]:
        return [rng.randrange(100, given.vocabulary) for _ in range(count)]

    with place(given, side) as server:
        Stream().read(server.port, prompt(WARM), 8)
        running = [Stream() for _ in range(given.streams)]
        readers = [start(one.read, server.port, prompt(40), given.answer or ANSWER) for one in running]
        while min(len(one.times) for one in running) < ENOUGH:
            time.sleep(0.05)
        began, waits = time.monotonic(), list[float]()
        for _ in range(given.prompts):
            asked, one = time.monotonic(), Stream()
            one.read(server.port, prompt(length), 2)
            waits.append(one.times[0] - asked)
        ended, alive = time.monotonic(), all(reader.is_alive() for reader in readers)
        for one in running:
            one.over.set()
        for reader in readers:
            reader.join()
    if not alive:
        raise SystemExit("a stream ended before the prompts were computed: more --answer is needed")
    gaps = sorted(gap for one in running for gap in one.gaps(began))
    return {
        "p50_gap_s": gaps[len(gaps) // 2],
        "p99_gap_s": gaps[len(gaps) * 99 // 100],
        "max_gap_s": gaps[-1],
        "gaps": len(gaps),
        "first_token_s": sorted(waits)[len(waits) // 2],
        "took_s": ended - began,
    }


def start(work: Callable[..., None], *arguments: object) -> threading.Thread:
    """Do it in a thread."""
    thread = threading.Thread(target=work, args=arguments, daemon=True)
    thread.start()
    return thread


def compare(given: argparse.Namespace) -> None:
    """Print a table: without roles, and with."""
    rows = []
    for length in given.tokens:
        mixed = disturbed(given, length, given.mixed)
        split = disturbed(given, length, SPLIT)
        for side, found in ((MIXED[given.mixed], mixed), (SPLIT, split)):
            rows.append({"tokens": length, "side": side, **found, "ratio": found["p99_gap_s"] / mixed["p99_gap_s"]})
    table(list(rows[0]), [list(row.values()) for row in rows])
