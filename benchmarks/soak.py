"""Rising load with a random fault every so often and bad clients beside it: nothing may be lost, wrong, twice, or grow.

Every request is one of a fixed set (soak_requests.py), whose answers were taken before the first fault. In the end
requests sent = answered + refused (429 or 503, with Retry-After) + broken (only an api that is killed breaks
connections); no answer differs, none hangs, no process has grown or keeps more files open, nothing is left running, and
the server ends with 0 and leaves no process.

First, by turns without and with the bad clients and with no faults, the gaps between tokens of one stream are measured
(a tenth of the time). Then come the faults, and a calm end with all clients (a fifth); whoever lives about as long as
that must not have grown.

With --kv-disk DIR KV is kept in a folder there, long prompts come too, and that folder fares badly: bits flip, parts
are cut or vanish, all of it vanishes, and it is full where DIR is on a small file system (mount -t tmpfs -o size=24m).
Replicas are drained, so that what runs there moves. Something must then have been read from disk.

The exit code is 1 when anything of that does not hold. In the evidence folder: the server's log, the bad clients'
deeds, each request that went wrong with what was expected, and summary.json, written anew all the time. Several soaks
can run at once. What one needs: python with PYTHONPATH=src, no network.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
from harness import Server, table, tandem_server
from soak_bad_clients import BadClients
from soak_clients import Clients
from soak_family import Family
from soak_kv import CONTEXT, Disk, long_requests, move
from soak_requests import Request, ask, requests

from tandem.testing import tiny_model

LAYOUTS: dict[str, dict[str, Any]] = {
    "pp": {"pipeline_parallel_size": 2}, "tp": {"tensor_parallel_size": 2}, "2,1": {"parallel": "2,1"},
    "dp": {"data_parallel_size": 2}, "dpxpp": {"data_parallel_size": 2, "pipeline_parallel_size": 2}}
TURNS = 4
"""How often the gaps are measured without bad clients, and as often with them."""
GAP = 2.0
"""With bad clients beside it, the 99th percentile of a stream's gaps may be so many times what it is without."""
FLOOR_S = 0.01
"""A percentile below this is noise of the machine: gaps are compared with it at the least."""
KV_TOKENS = 40_000
"""With KV on disk; less than all prompts, so that some of them are on disk alone."""
CALM = 0.2
"""Share of the time, at its end, without faults."""
REST_S = 20.0
"""After the last request, within this the server must have nothing left to do."""


class Soak:
    """One soak, and what it has found so far."""

    def __init__(self, args: argparse.Namespace, server: Server, folder: Path) -> None:
        self._args, self._server, self._folder = args, server, folder
        self._url = f"http://127.0.0.1:{server.port}"
        self._rng = random.Random(args.seed)
        self._work = requests(random.Random(args.seed))
        self._disk = Disk(args.kv_disk) if args.kv_disk else None
        if self._disk is not None:
            self._work += long_requests(random.Random(args.seed))
        answers = []
        for number, one in enumerate(self._work):
            answers.append(ask(self._url, one))
            if number % 8 == 7:
                print(f"{number + 1} of {len(self._work)} answers are known", flush=True)
        refused = [got for got in answers if got.kind != "answered"]
        assert not refused, refused
        self._clients = Clients(self._url, self._work, [got.answer for got in answers], folder)
        self._family = Family(server, args.clients, judged_s=0.9 * CALM * args.minutes * 60)
        self._faults: collections.Counter[str] = collections.Counter()
        self._gaps: dict[str, list[float]] = {"alone": [], "beside": []}
        self._started = self._told = time.monotonic()
        self._deeds = 0
        self._problems: list[str] = []

    def _bad_clients(self) -> BadClients:
        return BadClients(self._server.port, self._args.seed, self._args.heavy, self._folder / "bad-clients.log")

    def play(self) -> bool:
        """True when all is well."""
        self._clients.rise(2)
        if not self._args.no_gaps:
            self._measure_gaps()
        with self._bad_clients() as bad:
            self._disturb()
            self._deeds = bad.deeds
            if not self._clients.end():
                self._problems.append("requests never ended")
        self._look_at_rest()
        self._judge()
        self._summarise(finished=True)
        return not self._problems

    def _measure_gaps(self) -> None:
        seconds = self._args.minutes * 60 * 0.1 / (2 * TURNS)
        for turn in range(TURNS):
            self._gaps["alone"] += watch_stream(self._url, self._work, seconds)
            with self._bad_clients():
                time.sleep(1.0)
                self._gaps["beside"] += watch_stream(self._url, self._work, seconds)
            time.sleep(2.0)  # what they had asked ends
            gaps = self._percentiles()
            self._tell(f"gaps, turn {turn + 1} of {TURNS}: p99 {gaps['alone_p99_ms']} ms alone, "
                       f"{gaps['beside_p99_ms']} ms beside bad clients, {gaps['ratio']} times")

    def _percentiles(self) -> dict[str, float]:
        found: dict[str, float] = {}
        for name, gaps in self._gaps.items():
            gaps.sort()
            found |= {f"{name}_p{part}_ms": round(gaps[int(len(gaps) * part / 100)] * 1000, 1) if gaps else 0.0
                      for part in (50, 99)}
        found["ratio"] = round(found["beside_p99_ms"] / max(found["alone_p99_ms"], 0.1), 2)
        found["ratio_judged"] = round(found["beside_p99_ms"] / max(found["alone_p99_ms"], FLOOR_S * 1000), 2)
        return {**found, "samples": sum(len(gaps) for gaps in self._gaps.values())}

    def _disturb(self) -> None:
        """Rising load and faults, then the calm end."""
        alone = self._args.layout == "dp"
        roles = [*(["engine"] * 6 if alone else ["rank"] * 4 + ["engine"] * 2), "api", "worker"]
        began, whole = time.monotonic(), self._args.minutes * 60 * 0.9
        next_fault = began + self._args.every / 2
        while (spent := time.monotonic() - began) < whole:
            self._clients.rise(2 + int((self._args.clients - 2) * min(spent / (whole * (1 - CALM)), 1.0)))
            if time.monotonic() > next_fault and spent < whole * (1 - CALM):
                next_fault += self._args.every
                what = self._hurt(roles)
                self._faults[what] += 1
                self._tell(what)
            if time.monotonic() > self._told + 30:
                self._tell("")
            self._family.sample()
            self._summarise()
            time.sleep(1.0)

    def _hurt(self, roles: list[str]) -> str:
        """A process; with KV on disk as often that, and with replicas one of them leaves at times."""
        if self._disk is not None and self._rng.random() < 0.5:
            return self._disk.hurt(self._rng)
        if self._disk is not None and "data_parallel_size" in LAYOUTS[self._args.layout] and self._rng.random() < 0.4:
            return move(self._server.port, self._rng)
        return self._family.hurt(self._rng, roles, {"api": self._clients.excuse})

    def _tell(self, what: str) -> None:
        self._told = time.monotonic()
        bad = dict(self._clients.bad)
        print(f"{self._told - self._started:6.0f} s {self._args.layout}: {self._counts()}"
              f"{f'; BAD {bad}' if bad else ''}{f'; {what}' if what else ''}", flush=True)

    def _counts(self) -> str:
        kinds = ("answered", "refused", "failed", "broken", "hung")
        return f"sent {self._clients.sent} = " + " + ".join(f"{kind} {self._clients.outcomes[kind]}" for kind in kinds)

    def _look_at_rest(self) -> None:
        """Nothing is left to do, and the server ends as it should."""
        deadline, left = time.monotonic() + REST_S, "it did not answer"
        while left and time.monotonic() < deadline:
            time.sleep(1.0)
            try:
                status = httpx.get(f"{self._url}/v1/status", timeout=10).json()
                left = f"{status['num_running']} running, {status['num_waiting']} waiting"
                left = "" if left == "0 running, 0 waiting" else left
            except (httpx.HTTPError, ValueError, KeyError) as error:
                left = f"/v1/status: {type(error).__name__}"
        if left:
            self._problems.append(f"the server is not at rest after all clients have gone: {left}")
        codes = self._server.end()
        if codes != [0]:
            self._problems.append(f"after SIGTERM the server ended with {codes} in place of 0")
        if orphans := self._family.left():
            self._problems.append(f"left running: {', '.join(orphans)}")

    def _judge(self) -> None:
        clients, gaps = self._clients, self._percentiles()
        if clients.sent != sum(clients.outcomes.values()):
            self._problems.append("requests were lost")
        self._problems += [f"{count} x {kind}" for kind, count in clients.bad.items()]
        self._problems += [f"{row.role} {row.pid} has grown" for row in self._family.sizes() if row.grown]
        if not clients.outcomes["answered"] or not self._faults:
            self._problems.append("nothing was tried")
        if self._disk is not None and not clients.disk_tokens:
            self._problems.append("nothing was read from disk")
        if gaps["ratio_judged"] > GAP:
            self._problems.append(f"bad clients held up a good one's stream: {gaps['ratio_judged']} times")

    def _summarise(self, finished: bool = False) -> None:
        clients = self._clients
        processors = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
        facts = {
            "layout": self._args.layout, "finished": finished, "well": finished and not self._problems,
            "problems": self._problems, "arguments": {key: str(value) for key, value in vars(self._args).items()},
            "python": platform.python_version(), "processors": processors,
            "load": os.getloadavg()[0], "seconds": round(time.monotonic() - self._started),
            "sent": clients.sent, **{kind: clients.outcomes[kind]
                                     for kind in ("answered", "refused", "failed", "broken", "hung")},
            "wrong": clients.bad["wrong"], "twice": clients.bad["twice"],
            "broken_without_api_fault": clients.bad["broken"], "reasons": dict(clients.reasons),
            "faults": sum(self._faults.values()), "faults_by_kind": dict(self._faults),
            "disk_tokens": clients.disk_tokens, "bad_deeds": self._deeds, "gaps": self._percentiles(),
            "processes": [dataclasses.asdict(row) for row in self._family.sizes() if row.judged][:40],
        }
        new = self._folder / "summary.new"
        new.write_text(json.dumps(facts, indent=1) + "\n")
        new.replace(self._folder / "summary.json")
        if self._args.summary:
            shutil.copyfile(self._folder / "summary.json", self._args.summary)

    def report(self) -> None:
        """Print what happened."""
        columns = ("role", "pid", "seconds", "mb_first", "mb_last", "mb_most", "files_first", "files_last", "grown")
        rows = [row for row in self._family.sizes() if row.judged]
        table(columns, [[getattr(row, column) for column in columns] for row in rows[:12]])
        gaps = self._percentiles()
        if gaps["samples"]:
            print(f"p99 between tokens: {gaps['alone_p99_ms']} ms alone, {gaps['beside_p99_ms']} ms beside bad clients "
                  f"({gaps['ratio']} times, {gaps['samples']} gaps, no faults)")
        print(f"{self._deeds} bad deeds")
        print(f"{self._counts()}; wrong {self._clients.bad['wrong']}; twice {self._clients.bad['twice']}; "
              f"faults {dict(self._faults)}; {dict(self._clients.reasons)}"
              f"{f'; {self._clients.disk_tokens} tokens were read from disk' if self._disk is not None else ''}")
        print("; ".join(self._problems) or "all is well", flush=True)


def watch_stream(url: str, work: list[Request], seconds: float) -> list[float]:
    """The gaps between tokens of one stream after the other, in seconds."""
    streams = [one for one in work if one.path == "/v1/completions" and one.body["stream"]
               and one.body["max_tokens"] > 30]
    gaps: list[float] = []
    started, number = time.monotonic(), 0
    while time.monotonic() < started + seconds:
        gaps += ask(url, streams[number % len(streams)]).gaps
        number += 1
    return gaps


def main() -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long (default: %(default)s)")
    parser.add_argument("--every", type=float, default=20.0, help="seconds between faults (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=16, help="clients in the end (default: %(default)s)")
    parser.add_argument("--layout", choices=LAYOUTS, default="pp", help="which layout (default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a model directory; by default a tiny random one is made")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "gpu"),
                        help="where ranks compute (default: %(default)s)")
    parser.add_argument("--kv-disk", type=Path, metavar="DIR", help="keep KV in a folder there, and ill-treat it")
    parser.add_argument("--kv-disk-gb", type=float, default=0.02, help="room for it (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of requests and faults (default: %(default)s)")
    parser.add_argument("--heavy", type=int, default=1, help="bad clients with heavy bodies (default: %(default)s)")
    parser.add_argument("--no-gaps", action="store_true",
                        help="leave the gaps between tokens unmeasured: on a busy machine they say nothing")
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="folder to keep; by default a new temporary one")
    parser.add_argument("--summary", type=Path, metavar="FILE", help="also write the summary (JSON) to this file")
    args = parser.parse_args()
    folder = args.evidence or Path(tempfile.mkdtemp(prefix=f"tandem-soak-{args.layout.replace(',', '-')}-"))
    folder.mkdir(parents=True, exist_ok=True)
    print(f"evidence in {folder}", flush=True)
    kept = {} if args.kv_disk is None else {"kv_disk": Disk(args.kv_disk).directory, "kv_disk_gb": args.kv_disk_gb,
                                            "kv_tokens": KV_TOKENS}
    with tempfile.TemporaryDirectory(prefix="tandem-soak-") as directory:
        model = args.model or tiny_model(Path(directory), dtype="float32",
                                         config={"max_position_embeddings": CONTEXT if kept else 1024})
        with tandem_server(model, 1, log=folder / "server.log", log_level="INFO", max_restarts=1000, start_timeout=120,
                           device=args.device, **LAYOUTS[args.layout], **kept) as server:
            soak = Soak(args, server, folder)
            well = soak.play()
            soak.report()
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
