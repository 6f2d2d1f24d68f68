"""How long it takes to notice a fault and to go on, against the bare time of loading the model.

Noticed: from the signal until the server says of itself that it recovers, or has other ranks (or, of an engine, until
it is gone). Pause: the longest time between two tokens from the fault on, as a client sees it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import psutil
from harness import Server, arguments, middle, table, tandem_server, write_json

LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"executor": "cluster"},
    "pp": {"pipeline_parallel_size": 2},
    "tp": {"tensor_parallel_size": 2},
    "pp-standbys": {"pipeline_parallel_size": 2, "standby_ranks": 1},
    "tp-standbys": {"tensor_parallel_size": 2, "standby_ranks": 1},
}
TOKENS_BEFORE = 10
STANDBYS_S = 8.0
"""Seconds for standby ranks to import everything before the next fault."""


class Stream:
    """One long greedy answer, and when its tokens came."""

    def __init__(self, server: Server, tokens: int) -> None:
        self._url = f"http://127.0.0.1:{server.port}/v1/completions"
        self._body = {
            "model": "default",
            "prompt": [random.randrange(10, 500) for _ in range(32)],
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
        }
        self.times: list[float] = []
        self.whole = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=900) as client, client.stream("POST", self._url, json=self._body) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                    self.times.append(time.monotonic())
                self.whole |= line == "data: [DONE]"

    def wait(self, tokens: int) -> None:
        """Until so many are there."""
        while len(self.times) < tokens:
            time.sleep(0.002)

    def join(self) -> None:
        """Until its end."""
        self._thread.join()
        assert self.whole, "the answer was not finished"


def health(server: Server) -> dict[str, Any]:
    """/health whatever its status code."""
    reply: dict[str, Any] = httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=30).json()
    return reply


def until(condition: Any) -> float:
    """Wait, and return when it came true."""
    while not condition():
        time.sleep(0.005)
    return time.monotonic()


def one_fault(server: Server, victim: str, sig: signal.Signals, tokens: int, standbys: bool) -> tuple[float, float]:
    """Seconds to notice it, and the client's pause."""
    until(lambda: health(server)["status"] == "healthy")
    time.sleep(STANDBYS_S if standbys else 0)
    stream = Stream(server, tokens)
    stream.wait(TOKENS_BEFORE)
    ranks = [rank["pid"] for rank in health(server)["ranks"]]
    [engine] = [one for one in psutil.Process(server.processes[0].pid).children() if "engine" in one.cmdline()]
    pid = random.choice(ranks) if victim == "rank" else engine.pid
    started = time.monotonic()
    os.kill(pid, sig)
    if victim == "rank":
        noticed = until(
            lambda: (told := health(server))["status"] == "recovering" or [rank["pid"] for rank in told["ranks"]] != ranks
        )
    else:
        noticed = until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
    stream.join()
    if stream.times[-1] <= noticed:
        raise SystemExit(f"--tokens {tokens}: the answer was over before the fault was noticed; give more")
    return noticed - started, max(later - earlier for earlier, later in pairwise(stream.times) if later > started)


def measure(args: argparse.Namespace, layout: str) -> list[dict[str, Any]]:
    """Rows of one layout."""
    rows = []
    flags = {**LAYOUTS[layout], "max_restarts": 1000, "prefix_cache": 0, "dtype": args.dtype}
    with tandem_server(Path(args.model), args.threads, **flags) as server:
        loads = [_load_seconds(server)]
        for victim in ("rank", "engine"):
            for sig in (signal.SIGKILL, signal.SIGSTOP):
                pairs = []
                for _ in range(args.rounds):
                    pairs.append(one_fault(server, victim, sig, args.tokens, "standby_ranks" in flags))
                    print(
                        f"{layout} {sig.name} {victim}: noticed after {pairs[-1][0]:.2f} s, pause of {pairs[-1][1]:.2f} s",
                        flush=True,
                    )
                    with contextlib.suppress(TypeError, KeyError):
                        loads.append(_load_seconds(server))
                noticed, pauses = zip(*pairs, strict=True)
                rows.append(
                    {
                        "layout": layout,
                        "fault": f"{sig.name} {victim}",
                        "noticed": middle(noticed),
                        "noticed_worst": max(noticed),
                        "pause": middle(pauses),
                        "pause_worst": max(pauses),
                    }
                )
        for row in rows:
            row["load"] = middle(loads)
    return rows


def _load_seconds(server: Server) -> float:
    """What the last start of the ranks took."""
    until(lambda: server.get("/v1/status")["engine"])
    return float(server.get("/v1/status")["engine"]["load_s"])


def main() -> None:
    """Print the table."""
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--layouts", nargs="+", default=["pp", "tp"], choices=LAYOUTS, help="which ones")
    parser.add_argument("--tokens", type=int, default=120, help="length of each answer")
    args = parser.parse_args()
    rows = [row for layout in args.layouts for row in measure(args, layout)]
    columns = ("layout", "fault", "noticed", "noticed_worst", "pause", "pause_worst", "load")
    table(columns, [[row[name] for name in columns] for row in rows])
    write_json(args.json, args, {"rows": rows})


if __name__ == "__main__":
    main()
