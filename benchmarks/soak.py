"""Rising load with a random fault every so often: nothing may be lost, wrong, or grow.

Every request is one of a fixed set, whose answers were taken before the first fault. In the end requests sent =
answered + refused + broken (only an api that is killed breaks connections), no answer differs, and no process that
lived throughout has grown. The exit code is 1 otherwise.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import Server, table, tandem_server

from tandem.testing import tiny_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline_parallel_size": 2}, "tp": {"tensor_parallel_size": 2}, "dp": {"data_parallel_size": 2}}
PATIENCE_S = 120.0
GROWTH, GROWTH_MB = 1.25, 32.0
"""A process may grow by this factor or so much, whichever is more: heaps settle late."""
KINDS = 24


def bodies(rng: random.Random) -> list[dict[str, Any]]:
    """The set of requests: greedy and seeded, short and long, whole and streamed, some with a common prefix."""
    prefix = [rng.randrange(10, 500) for _ in range(200)]
    made = []
    for number in range(KINDS):
        prompt = [rng.randrange(10, 500) for _ in range(rng.choice([3, 30, 300]))]
        hot = {"temperature": 1.0, "seed": number, "presence_penalty": 0.5, "repetition_penalty": 1.1, "top_p": 0.9}
        made.append({"model": "default", "prompt": prefix + prompt if number % 4 == 0 else prompt, "ignore_eos": True,
                     "max_tokens": rng.choice([4, 40, 160]), "stream": number % 3 > 0,
                     **(hot if number % 2 else {"temperature": 0})})
    return made


def ask(url: str, body: dict[str, Any]) -> tuple[str, str]:
    """What became of one request: `answered` and the text, or `refused` or `broken` and why."""
    try:
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as got:
            if got.status_code != 200:
                got.read()
                return "refused", f"{got.status_code} {got.json()['error']['code']}"
            if not body["stream"]:
                got.read()
                return "answered", got.json()["choices"][0]["text"]
            return _read(got)
    except httpx.TransportError as error:
        return "broken", type(error).__name__


def _read(got: httpx.Response) -> tuple[str, str]:
    text = ""
    for line in got.iter_lines():
        if line == "data: [DONE]":
            return "answered", text
        if line.startswith("data: "):
            chunk = json.loads(line[6:])
            if "error" in chunk:
                return "refused", f"stream {chunk['error']['code']}"
            text += chunk["choices"][0]["text"] if chunk["choices"] else ""
    return "broken", "the stream ended early"


class Clients:
    """So many clients as `wanted`, each with one request after the other, until `over`."""

    def __init__(self, url: str, work: list[dict[str, Any]], expected: list[str]) -> None:
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
            outcome, detail = ask(self._url, self._work[index])
            with self._lock:
                self.outcomes[outcome] += 1
                if outcome != "answered":
                    self.reasons[f"{outcome}: {detail}"] += 1
                elif detail != self._expected[index]:
                    self.wrong.append(f"request {index}: {detail!r} instead of {self._expected[index]!r}")
            if outcome != "answered":
                time.sleep(0.2)

    def end(self) -> bool:
        """Let all finish; False if one does not."""
        self.over = True
        for thread in self._threads:
            thread.join(PATIENCE_S)
        return not any(thread.is_alive() for thread in self._threads)


class Family:
    """The server's processes: for hurting them, and their memory."""

    def __init__(self, server: Server) -> None:
        self._root = psutil.Process(server.processes[0].pid)
        self._memory: dict[psutil.Process, list[float]] = {}

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
        """Note the memory of every process that is older than 15 s."""
        for one in [self._root, *self._root.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                size = one.memory_info().rss / 2**20
                if size and time.time() - one.create_time() > 15:  # one that has just died has none
                    self._memory.setdefault(one, []).append(size)

    def grown(self) -> list[tuple[str, int, float, float, bool]]:
        """(process, samples, MB at first, MB at last, too much) of each process."""
        rows = []
        for one, sizes in self._memory.items():
            few = max(1, len(sizes) // 10)
            first, last = max(sizes[:few]), min(sizes[-few:])
            rows.append((str(one.pid), len(sizes), first, last, last > max(first * GROWTH, first + GROWTH_MB)))
        return sorted(rows, key=lambda row: -row[1])


def play(args: argparse.Namespace, server: Server) -> bool:
    """The soak; True when all is well."""
    rng = random.Random(args.seed)
    url = f"http://127.0.0.1:{server.port}"
    work = bodies(rng)
    outcomes = [ask(url, body) for body in work]
    assert all(kind == "answered" for kind, _ in outcomes), outcomes
    clients, family = Clients(url, work, [text for _, text in outcomes]), Family(server)
    kinds = [*(["engine"] * 6 if args.layout == "dp" else ["tandem.executors.worker"] * 4 + ["engine"] * 2), "api"]
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
    ended = clients.end()
    well = report(clients, family, faults, ended)
    if server.processes[0].poll() is not None or any("shutting_down" in reason for reason in clients.reasons):
        print(f"the server has ended, or was about to:\n{server.log()}")
        return False
    return well


def report(clients: Clients, family: Family, faults: collections.Counter[str], ended: bool) -> bool:
    """Print what happened; True when all is well."""
    rows = family.grown()
    table(("process", "samples", "MB at first", "MB at last"), [row[:4] for row in rows[:8]])
    api_faults = sum(count for what, count in faults.items() if what.endswith("api"))
    counts = clients.outcomes
    print(f"sent {clients.sent} = answered {counts['answered']} + refused {counts['refused']} + broken "
          f"{counts['broken']}; wrong {len(clients.wrong)}; faults {dict(faults)}; {dict(clients.reasons)}")
    problems = []
    if not ended or clients.sent != sum(counts.values()):
        problems.append("requests were lost")
    if clients.wrong:
        problems.append("wrong texts: " + "; ".join(clients.wrong[:3]))
    if counts["broken"] and not api_faults:
        problems.append("connections broke though no api was hurt")
    if any(row[4] for row in rows):
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
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as directory:
        model = tiny_model(Path(directory), dtype="float32", config={"max_position_embeddings": 1024})
        with tandem_server(model, 1, max_restarts=1000, start_timeout=120, **LAYOUTS[args.layout]) as server:
            return 0 if play(args, server) else 1


if __name__ == "__main__":
    sys.exit(main())
