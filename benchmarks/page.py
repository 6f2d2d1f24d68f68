"""What the page at `/ui`, open in a browser, costs a server at work: throughput with and without it, in turns.

A browser on the same machine would take more of it than the server does for the page. So a real Chromium opens the page
once and the server's own counters tell what it asks for; then those requests are sent at that rate while 8 clients are
served. Throughput is noisy to some percent, hence also the processor time that answering them takes while nothing else
happens, as a share of the machine. Goal: less than 1 % of either.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import harness
import load
import psutil

GOAL = 0.01
COUNTED = re.compile(r'^tandem_http_requests_total\{method="GET",route="([^"]+)",status="200"\} (\S+)$', re.M)


def main() -> None:
    """Measure and print."""
    parser = harness.arguments(__doc__, rounds=5)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=20, help="for which the page is watched, and idling measured")
    args = parser.parse_args()
    results: dict[str, Any] = {"verdicts": []}
    model = harness.prepared(args.model, args.dtype, harness.on_gpu())
    with harness.tandem_server(model, args.threads, pipeline_parallel_size=2) as server:
        asked = watch(server, args.seconds)
        print("the page asks, times a second: " + ", ".join(f"{path} {rate:.2f}" for path, rate in asked.items()))
        share = idle_share(server, asked, args.seconds)
        ratio = throughput(args, server, asked, results)
    results["verdicts"] += [
        harness.verdict("processor time for the page, share of the machine", share, GOAL, at_most=True),
        harness.verdict("throughput with the page open, median of the rounds' ratios", ratio, 1 - GOAL),
    ]
    harness.write_json(args.json, args, results)


def watch(server: harness.Server, seconds: float) -> dict[str, float]:
    """Requests a second of an open page, by path, once it is loaded."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("no Chromium is here: install chromium, whose requests are counted")
    with tempfile.TemporaryDirectory() as profile:
        browser = subprocess.Popen(
            [
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--remote-debugging-port=0",
                f"--user-data-dir={profile}",
                f"http://127.0.0.1:{server.port}/ui",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            time.sleep(seconds)
            before, started = counts(server), harness.now()
            time.sleep(seconds)
            after, took = counts(server), harness.now() - started
        finally:
            browser.terminate()
            browser.wait()
    found = {path: (after[path] - before.get(path, 0)) / took for path in after if path.startswith("/v1/")}
    asked = {path: rate for path, rate in found.items() if rate}
    if not asked:
        raise SystemExit("the page asked for nothing: did the browser open it?")
    return asked


def counts(server: harness.Server) -> dict[str, float]:
    """GET requests answered so far, by route."""
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
        return {route: float(value) for route, value in COUNTED.findall(answer.read().decode())}


@contextmanager
def open_page(server: harness.Server, asked: dict[str, float]) -> Iterator[None]:
    """The page's requests are sent inside, each path at its own rate."""
    over = threading.Event()

    def ask(path: str, rate: float) -> None:
        while not over.wait(1 / rate):
            server.get(path)

    threads = [threading.Thread(target=ask, args=item) for item in asked.items()]
    for thread in threads:
        thread.start()
    yield
    over.set()
    for thread in threads:
        thread.join()


def idle_share(server: harness.Server, asked: dict[str, float], seconds: float) -> float:
    """Processor time that the page's requests take, as a share of all processors; without work beside them."""
    used = []
    for requests in ({}, asked):
        with open_page(server, requests):
            before = processor_seconds(server)
            time.sleep(seconds)
            used.append(processor_seconds(server) - before)
    return (used[1] - used[0]) / seconds / (os.cpu_count() or 1)


def processor_seconds(server: harness.Server) -> float:
    """Of all processes of the server."""
    total = 0.0
    for process in server.processes:
        for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
            times = one.cpu_times()
            total += times.user + times.system
    return total


def throughput(args: argparse.Namespace, server: harness.Server, asked: dict[str, float], results: dict[str, Any]) -> float:
    """Tokens per second with the page open over those without, median of the rounds."""
    prompts = load.PromptSource()

    def side() -> float:
        jobs = [load.BenchRequest(prompts.make(64), 32) for _ in range(2 * args.concurrency)]
        return load.rate(load.closed_loop(server, jobs, args.concurrency))

    def play() -> list[float]:
        closed = side()
        with open_page(server, asked):
            return [closed, side()]

    play()
    with harness.heading(f"{args.concurrency} clients, with the page open and without"):
        rows = [
            [number + 1, *rates, rates[1] / rates[0], others] for number, (rates, others) in enumerate(harness.rounds(args, play))
        ]
        harness.table(["round", "without tok/s", "with tok/s", "ratio", "others"], rows)
    results["rounds"] = rows
    return harness.middle([float(row[3]) for row in rows])


if __name__ == "__main__":
    main()
