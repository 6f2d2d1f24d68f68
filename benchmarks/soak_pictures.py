"""Text, one picture and three pictures in one batch, in one layout after the other, while ranks and engines are killed.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed.
"""

from __future__ import annotations

import base64
import collections
import contextlib
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from harness import Server, table, tandem_server
from soak_processes import Processes
from soak_requests import Outcome, Request
from soak_storm import PLACES, Found, over_layouts, storm, undisturbed

from processors import encoded, mutants, noise
from seeing import served_model

APART = {"vision_rank": "own"}
LAYOUTS = PLACES | {
    "one rank, encoder apart": ({**PLACES["one rank"][0], **APART}, ("encoder", "engine")),
    "pp 2, encoder apart": ({**PLACES["pp 2"][0], **APART}, ("rank", "encoder")),
}
"""Options of `tandem serve` and what is killed, by layout. Every third new encoder is killed in its first second too, while it
loads or encodes."""
NEW = 40
"""Tokens of each answer."""
PROMPTS = ("the red sea", "one two one two one", "a stone that is not there " * 8)
ALONE = 2000
"""Gaps of a stream alone."""
COUNTS = (0, 1, 3)
"""Pictures of a request."""


def pictures(directory: Path, count: int, seed: int, device: str, folder: Path) -> bool:
    """Ask for `count` answers over all layouts, and print a table; True when all is well."""
    model = served_model(directory / "sees")
    return over_layouts("pictures", LAYOUTS, model, _stormed, count=count, seed=seed, device=device, folder=folder)


def damaged(directory: Path, count: int, device: str, folder: Path) -> bool:
    """Send `count` damaged pictures beside a text stream, and print what came and the stream's gaps; True when all is well."""
    found: collections.Counter[str] = collections.Counter()
    odd: list[str] = []
    log = folder / "damaged-pictures.log"
    with tandem_server(served_model(directory / "sees"), 1, log=log, start_timeout=120, device=device) as server:
        url = f"http://127.0.0.1:{server.port}/v1/chat/completions"
        with httpx.Client(timeout=240) as client:

            def send(raw: bytes, tokens: int) -> httpx.Response:
                address = f"data:image/png;base64,{base64.b64encode(raw).decode()}"
                parts = [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {"url": address}}]
                return client.post(url, json={"messages": [{"role": "user", "content": parts}], "max_tokens": tokens})

            send(encoded(noise()), 4).raise_for_status()  # the tower and a worker process are loaded
            alone = _gaps(url, lambda gaps: len(gaps) > ALONE)
            ended = threading.Event()
            beside: list[float] = []
            streaming = threading.Thread(target=lambda: beside.extend(_gaps(url, lambda _: ended.is_set())))
            streaming.start()
            for kind, raw in mutants(count):
                got = send(raw, 1)
                found[f"{kind} {got.status_code}"] += 1
                if got.status_code != 200 and (got.status_code != 400 or "message" not in got.json().get("error", {})):
                    odd.append(f"{kind}: {got.status_code} {got.text[:200]}")
            ended.set()
            streaming.join()
        codes = server.end()
    if "Traceback" in log.read_text(errors="replace") or codes != [0]:
        odd.append(f"ended with {codes}, or a traceback: see {log}")
    table(("kind and status", "pictures"), sorted(found.items()))
    p99 = [sorted(gaps)[len(gaps) * 99 // 100] for gaps in (alone, beside)]
    print(f"p99 gap of a text stream: {p99[0]:.4f} s alone, {p99[1]:.4f} s beside ({p99[1] / p99[0]:.2f}; {len(beside)} gaps)")
    print("\n".join([*odd[:10], "NOT all is well" if odd else "all is well"]), flush=True)
    return not odd


def _gaps(url: str, over: Callable[[list[float]], bool]) -> list[float]:
    """Return the seconds between the tokens of streams, one after the other, until it is `over`."""
    gaps: list[float] = []
    body = {"messages": [{"role": "user", "content": "the red sea"}], "max_tokens": 200, "ignore_eos": True, "stream": True}
    while not over(gaps):
        last = 0.0
        with httpx.stream("POST", url, json=body, timeout=240) as reply:
            for line in reply.iter_lines():
                if line.startswith("data: {"):
                    now = time.monotonic()
                    gaps += [now - last] if last else []
                    last = now
    return gaps


def _stormed(server: Server, count: int, rng: random.Random, roles: tuple[str, ...]) -> Found:
    work, found = [], Found(figures={"pictures": 0})
    for number in range(len(PROMPTS) * len(COUNTS) * 2):
        shown = [noise(16, 16, 10 * number + at) for at in range(COUNTS[number % len(COUNTS)])]
        urls = [f"data:image/png;base64,{base64.b64encode(encoded(one)).decode()}" for one in shown]
        parts = [
            {"type": "text", "text": PROMPTS[number // len(COUNTS) % len(PROMPTS)]},
            *({"type": "image_url", "image_url": {"url": url}} for url in urls),
        ]
        how = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
        more = {"max_tokens": NEW, "ignore_eos": True, "logprobs": True, "stream": number % 4 < 2, **how}
        work.append(
            Request("/v1/chat/completions", {"model": "default", "messages": [{"role": "user", "content": parts}], **more})
        )
    rng.shuffle(work)
    expected = undisturbed(server, work, differ=True)

    def judge(at: int, got: Outcome) -> None:
        many = len(work[at].body["messages"][0]["content"]) - 1
        found.figures["pictures"] += many
        found.compare(f"{many} pictures", got, expected[at])

    over, processes = threading.Event(), Processes(server)

    def kill_new() -> None:
        seen = {one.pid for one, role in processes.living().items() if role == "encoder"}
        spared = 0
        while not over.wait(0.05):
            new = [one for one, role in processes.living().items() if role == "encoder" and one.pid not in seen]
            seen.update(one.pid for one in new)
            for one in new:
                if spared == 0 and not over.wait(rng.random()):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
                        found.kills["SIGKILL new encoder"] += 1
                spared = (spared + 1) % 3

    killing = threading.Thread(target=kill_new)
    killing.start()
    storm(server, work, count, judge, found, rng, roles)
    over.set()
    killing.join()
    return found
