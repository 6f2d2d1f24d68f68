"""Memory and descriptors over many requests, and a good client's latency beside bad ones: each on a server alone."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from harness import Server, table, tandem_server
from soak_bad_clients import BadClients
from soak_processes import Processes, Size
from soak_requests import PATIENCE_S
from soak_schedule import LAYOUTS

WARM_UP = 300
"""Requests before the first look at memory."""
LOOK = 1000
"""Requests between two looks."""
ABORTED = 10
"""One stream is left amid it for so many requests."""
GROWTH, GROWTH_MB, GROWTH_DESCRIPTORS = 1.1, 8.0, 8
"""From the second look on a process may grow by this factor or so many MB, whichever is more, and by so many
descriptors. Until then caches fill."""
BESIDE = {"leave": 50, "half": 50, "bombs": 6}
"""Bad clients by kind, each beside a good one by itself."""
TURNS = 3
"""Measurements of each kind, in turns with one without bad clients."""


def flat(model: Path, layout: str, count: int, device: str) -> bool:
    """Print what each process takes by thousands of requests; True when none has grown."""
    with tandem_server(model, 1, device=device, **LAYOUTS[layout]) as server:
        processes, done, looks = Processes(server), 0, []
        marks = [WARM_UP, *range(LOOK, count + 1, LOOK)] if count >= LOOK else [WARM_UP, count]
        for mark in marks:
            _ask_many(server, mark - done)
            done = mark
            time.sleep(1.0)
            looks.append({size.pid: size for size in processes.sizes()})
            print(f"{done} requests", flush=True)
    rows, well = [], True
    for pid, last in looks[-1].items():
        seen = [look.get(pid) for look in looks]
        grown = len(looks) > 2 and _grown(looks[2 if len(looks) > 3 else 1].get(pid), last)
        well &= not grown
        rows.append(
            [
                f"{last.role} {pid}",
                *(f"{one.mb:.1f} / {one.descriptors}" if one else "-" for one in seen),
                "GROWN" if grown else "flat",
            ]
        )
    table(["MB / descriptors", *map(str, marks), ""], rows)
    return well


def _grown(first: Size | None, last: Size) -> bool:
    if first is None:
        return False
    return last.mb > max(first.mb * GROWTH, first.mb + GROWTH_MB) or last.descriptors > first.descriptors + GROWTH_DESCRIPTORS


def _ask_many(server: Server, count: int) -> None:
    """Send short requests, eight at once, each tenth of them a stream that is left after its first piece."""
    numbers, lock = iter(range(count)), threading.Lock()

    def run(client: httpx.Client) -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            body = _body(random.randrange(1 << 20), tokens=400 if number % ABORTED == 0 else 4)
            with client.stream("POST", f"http://127.0.0.1:{server.port}/v1/completions", json=body) as reply:
                for _ in reply.iter_lines():
                    if number % ABORTED == 0:
                        break

    with httpx.Client(timeout=PATIENCE_S) as client:
        _in_threads(lambda: run(client), 8)


def good_client(model: Path, layout: str, minutes: float, device: str, seed: int) -> None:
    """Print latencies of a good client that streams 12 tokens, two at once, beside bad ones of each kind by turns."""
    kinds = ["nobody", *BESIDE]
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    health: dict[str, list[float]] = {kind: [] for kind in kinds}
    seconds = minutes * 60 / (TURNS * len(kinds))
    with (
        tempfile.TemporaryDirectory(prefix="tandem-soak-") as folder,
        tandem_server(model, 1, device=device, **LAYOUTS[layout]) as server,
    ):
        _watch(server, 3.0, [], [])
        for turn in range(TURNS):
            for kind in kinds:
                if kind == "nobody":
                    _watch(server, seconds, found[kind], health[kind])
                    continue
                with BadClients(server.port, f"{seed}/{turn}", {kind: BESIDE[kind]}, Path(folder) / f"{kind}.log"):
                    time.sleep(2.0)
                    _watch(server, seconds, found[kind], health[kind])
                time.sleep(3.0)
            print(f"turn {turn + 1} of {TURNS}", flush=True)
        deeds = {kind: len((Path(folder) / f"{kind}.log").read_bytes().splitlines()) for kind in BESIDE}
    alone = _part(found["nobody"], 99)
    table(
        ["beside", "requests", "p50 s", "p99 s", "p99 / alone", "/health p99 s", "deeds"],
        [
            [
                f"{kind}{f' x {BESIDE[kind]}' if kind in BESIDE else ''}",
                len(found[kind]),
                *(f"{_part(found[kind], percent):.3f}" for percent in (50, 99)),
                _part(found[kind], 99) / alone,
                f"{_part(health[kind], 99):.3f}",
                deeds.get(kind, 0),
            ]
            for kind in kinds
        ],
    )


def _watch(server: Server, seconds: float, latencies: list[float], health: list[float]) -> None:
    url, until = f"http://127.0.0.1:{server.port}", time.monotonic() + seconds

    def repeat(ask: Callable[[httpx.Client], object], found: list[float], pause_s: float) -> None:
        with httpx.Client(timeout=PATIENCE_S) as client:
            while (began := time.monotonic()) < until:
                ask(client)
                found.append(time.monotonic() - began)
                time.sleep(pause_s)

    def stream(client: httpx.Client) -> None:
        client.post(f"{url}/v1/completions", json=_body(random.randrange(1 << 20), tokens=12)).raise_for_status()

    watcher = threading.Thread(target=repeat, args=(lambda client: client.get(f"{url}/health"), health, 0.2))
    watcher.start()
    _in_threads(lambda: repeat(stream, latencies, 0.0), 2)
    watcher.join()


def _in_threads(run: Callable[[], object], count: int) -> None:
    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _body(seed: int, tokens: int) -> dict[str, object]:
    rng = random.Random(seed)
    return {
        "model": "default",
        "prompt": [rng.randrange(10, 500) for _ in range(8)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def _part(values: list[float], percent: int) -> float:
    """Return a percentile of latencies."""
    return sorted(values)[int(len(values) * percent / 100)]
