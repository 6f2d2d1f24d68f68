"""Rising load with a random fault every so often and bad clients beside it: nothing may be lost, wrong, twice, or grow.

Every request is one of a fixed set (soak_requests.py), whose answers were taken before the first fault. In the end
requests sent = answered + refused (429 or 503, with Retry-After) + broken (only an api that is killed breaks
connections); no answer differs, none hangs, and no process that lived throughout has grown or keeps more files open.
Before the faults, one stream's gaps between tokens are measured without and with the bad clients. The exit code is 1
when anything of that does not hold.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
from harness import Server, table, tandem_server
from soak_bad_clients import BadClients
from soak_requests import PATIENCE_S, Request, ask, requests, same

from tandem.testing import tiny_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline_parallel_size": 2}, "tp": {"tensor_parallel_size": 2}, "2,1": {"parallel": "2,1"},
    "dp": {"data_parallel_size": 2}, "dpxpp": {"data_parallel_size": 2, "pipeline_parallel_size": 2}}
GROWTH, GROWTH_MB = 1.25, 32.0
"""A process may grow by this factor or so much, whichever is more: heaps settle late."""
GROWTH_FILES = 16
GAP = 2.0
"""With bad clients beside it, the 99th percentile of a stream's gaps may be so many times what it is without."""
NEAR_S = 0.02
"""A percentile below this is noise of the machine, not waiting."""


class Clients:
    """So many clients as `wanted`, each with one request after the other, until `over`."""

    def __init__(self, url: str, work: list[Request], expected: list[dict[str, Any]]) -> None:
        self._url, self._work, self._expected = url, work, expected
        self._lock = threading.Lock()
        self.over = False
        self.wanted = 0
        self._threads: list[threading.Thread] = []
        self.sent = 0
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def rise(self, wanted: int) -> None:
        """From now on so many."""
        self.wanted = wanted
        while len(self._threads) < wanted:
            self._threads.append(threading.Thread(target=self._run, args=(len(self._threads),), daemon=True))
            self._threads[-1].start()

    def _run(self, number: int) -> None:
        rng = random.Random(number)
        while not self.over:
            index = rng.randrange(len(self._work))
            with self._lock:
                self.sent += 1
            got = ask(self._url, self._work[index])
            with self._lock:
                self.outcomes[got.kind] += 1
                if got.kind != "answered":
                    self.reasons[f"{got.kind}: {got.detail}"] += 1
                elif not same(got.answer, self._expected[index]):
                    self.wrong.append(f"{self._work[index].name}: {got.answer} instead of {self._expected[index]}")
            if got.kind != "answered":
                time.sleep(0.2)

    def end(self) -> bool:
        """Let all finish; False if one does not."""
        self.over = True
        for thread in self._threads:
            thread.join(2 * PATIENCE_S)
        return not any(thread.is_alive() for thread in self._threads)


class Family:
    """The server's processes: for hurting them, their memory and their open files."""

    def __init__(self, server: Server) -> None:
        self._root = psutil.Process(server.processes[0].pid)
        self._sizes: dict[psutil.Process, list[tuple[float, int]]] = {}

    def of(self, kind: str) -> list[psutil.Process]:
        """Processes with a word in their command line."""
        found = []
        for one in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                if kind in one.cmdline():
                    found.append(one)
        return found

    def hurt(self, rng: random.Random, kinds: list[str]) -> str:
        """Kill or stop one process; returns what was done."""
        kind = rng.choice(kinds)
        victims = self.of(kind)
        if not victims:
            return f"no {kind}"
        victim, sig = rng.choice(victims), rng.choice([signal.SIGKILL, signal.SIGSTOP])
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, sig)
        return f"{sig.name} {kind.rsplit('.', 1)[-1]}"

    def sample(self) -> None:
        """Note memory and open files of every process that is older than 15 s."""
        for one in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.Error):
                size = one.memory_info().rss / 2**20
                if size and time.time() - one.create_time() > 15:  # one that has just died has none
                    self._sizes.setdefault(one, []).append((size, one.num_fds()))

    def grown(self) -> list[tuple[str, int, float, float, int, int, bool]]:
        """(process, samples, MB at first, MB at last, files at first, files at last, too much) of each process."""
        rows = []
        for one, sizes in self._sizes.items():
            few = max(1, len(sizes) // 10)
            first, last = max(size for size, _ in sizes[:few]), min(size for size, _ in sizes[-few:])
            before, after = max(files for _, files in sizes[:few]), min(files for _, files in sizes[-few:])
            much = last > max(first * GROWTH, first + GROWTH_MB) or after > before + GROWTH_FILES
            rows.append((str(one.pid), len(sizes), first, last, before, after, much))
        return sorted(rows, key=lambda row: -row[1])


def watch_stream(url: str, work: list[Request], seconds: float) -> float:
    """99th percentile of the gaps between tokens of one stream after the other, in seconds."""
    streams = [one for one in work if one.path == "/v1/completions" and one.body["stream"]
               and one.body["max_tokens"] > 30]
    gaps: list[float] = []
    started, number = time.monotonic(), 0
    while time.monotonic() < started + seconds:
        gaps += ask(url, streams[number % len(streams)]).gaps
        number += 1
    return sorted(gaps)[int(len(gaps) * 0.99)] if gaps else float("inf")


def play(args: argparse.Namespace, server: Server) -> bool:
    """The soak; True when all is well."""
    rng = random.Random(args.seed)
    url = f"http://127.0.0.1:{server.port}"
    work = requests(rng)
    outcomes = [ask(url, one) for one in work]
    assert all(got.kind == "answered" for got in outcomes), [got for got in outcomes if got.kind != "answered"]
    clients, family = Clients(url, work, [got.answer for got in outcomes]), Family(server)
    clients.rise(2)
    alone = watch_stream(url, work, args.minutes * 60 * 0.05)
    bad = BadClients(server.port, args.seed)
    bad.start(heavy=args.heavy)
    beside = watch_stream(url, work, args.minutes * 60 * 0.05)
    faults = _disturb(args, clients, family, rng)
    ended = clients.end()
    bad.end()
    print(f"p99 between tokens: {alone * 1000:.1f} ms alone, {beside * 1000:.1f} ms beside bad clients "
          f"({beside / alone:.2f} times); {bad.deeds} bad deeds")
    well = report(clients, family, faults, ended)
    if beside > GAP * max(alone, NEAR_S):
        print("bad clients held up a good one's stream")
        well = args.no_gaps and well
    if server.processes[0].poll() is not None or any("shutting_down" in reason for reason in clients.reasons):
        print(f"the server has ended, or was about to:\n{server.log()}")
        return False
    return well


def _disturb(args: argparse.Namespace, clients: Clients, family: Family,
             rng: random.Random) -> collections.Counter[str]:
    """Rising load and faults, until the time is over; what was done."""
    only_engines = args.layout == "dp"
    kinds = [*(["engine"] * 6 if only_engines else ["tandem.executors.worker"] * 4 + ["engine"] * 2), "api"]
    faults: collections.Counter[str] = collections.Counter()
    started = time.monotonic()
    next_fault = started + args.every / 2
    while (spent := time.monotonic() - started) < args.minutes * 60:
        clients.rise(2 + int((args.clients - 2) * spent / (args.minutes * 60)))
        if time.monotonic() > next_fault and spent < args.minutes * 60 - args.every / 2:
            next_fault += args.every
            what = family.hurt(rng, kinds)
            faults[what] += 1
            print(f"{spent:6.0f} s: {what}; {clients.sent} sent", flush=True)
        family.sample()
        time.sleep(1.0)
    return faults


def report(clients: Clients, family: Family, faults: collections.Counter[str], ended: bool) -> bool:
    """Print what happened; True when all is well."""
    rows = family.grown()
    table(("process", "samples", "MB at first", "MB at last", "files at first", "files at last"),
          [row[:6] for row in rows[:8]])
    api_faults = sum(count for what, count in faults.items() if what.endswith("api"))
    counts = clients.outcomes
    kinds = ("answered", "refused", "failed", "broken", "hung")
    print(f"sent {clients.sent} = " + " + ".join(f"{kind} {counts[kind]}" for kind in kinds) +
          f"; wrong {len(clients.wrong)}; faults {dict(faults)}; {dict(clients.reasons)}")
    problems = []
    if not ended or counts["hung"] or clients.sent != sum(counts.values()):
        problems.append("requests were lost")
    if counts["failed"]:
        problems.append("requests failed that should have been answered, or refused with 429 or 503 and Retry-After")
    if clients.wrong:
        problems.append("wrong answers: " + "; ".join(clients.wrong[:3]))
    if counts["broken"] and not api_faults:
        problems.append("connections broke though no api was hurt")
    if any(row[-1] for row in rows):
        problems.append("a process has grown")
    if not counts["answered"] or not faults:
        problems.append("nothing was tried")
    print("; ".join(problems) or "all is well", flush=True)
    return not problems


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: %(default)s)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="clients in the end (default: %(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="pp", help="which layout (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the faults (default: %(default)s)")
    parser.add_argument("--heavy", type=int, default=1, help="bad clients with heavy bodies (default: %(default)s)")
    parser.add_argument("--no-gaps", action="store_true",
                        help="only print the gaps between tokens: on a busy machine they say nothing")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as directory:
        model = tiny_model(Path(directory), dtype="float32", config={"max_position_embeddings": 1024})
        with tandem_server(model, 1, max_restarts=1000, start_timeout=120, **LAYOUTS[args.layout]) as server:
            return 0 if play(args, server) else 1


if __name__ == "__main__":
    sys.exit(main())
