"""Requests in one layout after the other while ranks and engines are killed, as of soak.py --budgets, --adapters and --pictures.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import Server, table, tandem_server
from soak_processes import Processes
from soak_requests import Outcome, Request, ask, same
from soak_schedule import LAYOUTS
from soak_tally import EXCUSE_S

Place = tuple[dict[str, Any], tuple[str, ...]]
PLACES: dict[str, Place] = {
    "one rank": ({}, ("engine",)),
    "pp 2": (LAYOUTS["pp"], ("rank", "engine")),
    "tp 2": (LAYOUTS["tp"], ("rank", "engine")),
    "dp 2": (LAYOUTS["dp"], ("engine",)),
}
"""Options of `tandem serve` and what is killed, by layout."""
CLIENTS = 6
BETWEEN = 12
"""Answers between two kills."""


@dataclasses.dataclass
class Found:
    """Findings in one layout."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    retried: int = 0
    answers: int = 0
    figures: dict[str, int] = dataclasses.field(default_factory=dict)
    """Further columns of the table."""
    wrong: dict[str, list[str]] = dataclasses.field(default_factory=lambda: {"different": [], "lost": []})
    """What did not hold, by kind."""

    @property
    def well(self) -> bool:
        """Whether everything held, and something was killed."""
        return bool(self.kills) and not any(self.wrong.values())

    def settle(self) -> None:
        """Judge what needs no server any more."""

    def lost(self, name: str, got: Outcome) -> bool:
        """Count an answer; return whether it did not come whole and once, which is noted."""
        self.answers += 1
        if lost := got.kind != "answered" or got.twice:
            self.wrong["lost"].append(f"{name}: {got.kind} {got.detail}")
        return lost

    def compare(self, name: str, got: Outcome, alone: Outcome) -> None:
        """Count an answer, and note whether it is lost or not as `alone`."""
        if not self.lost(name, got) and not same(got.answer, alone.answer):
            self.wrong["different"].append(f"{name}: not as alone")


def over_layouts(
    what: str,
    layouts: Mapping[str, Place],
    model: Path,
    play: Callable[[Server, int, random.Random, tuple[str, ...]], Found],
    *,
    count: int,
    seed: int,
    device: str,
    folder: Path,
    **options: Any,
) -> bool:
    """Have `play` ask for its share of `count` answers in each layout, and print a table; True when all is well."""
    rows: list[dict[str, object]] = []
    options |= {"max_restarts": 1000, "start_timeout": 120, "device": device}
    for number, (name, (flags, roles)) in enumerate(layouts.items()):
        share = count // len(layouts) + (number < count % len(layouts))
        log = folder / f"{what}-{name.replace(' ', '')}.log"
        began = time.monotonic()
        with tandem_server(model, 1, log=log, **options, **flags) as server:
            found = play(server, share, random.Random(f"{seed}/{name}"), roles)
            codes = server.end()
        found.settle()
        if "Traceback" in log.read_text(errors="replace") or codes != [0]:
            found.wrong["lost"].append(f"ended with {codes}, or a traceback: see {log}")
        rows.append(
            {
                "layout": name,
                "s": round(time.monotonic() - began),
                "kills": ", ".join(f"{times} x {killed}" for killed, times in found.kills.items()),
                "answers": found.answers,
                **found.figures,
                **{kind: len(texts) for kind, texts in found.wrong.items()},
                "asked again": found.retried,
                "well": "yes" if found.well else "NO",
            }
        )
        for kind, texts in found.wrong.items():
            for text in texts[:5]:
                print(f"{name}: {kind}: {text}", flush=True)
    table(tuple(rows[0]), [list(row.values()) for row in rows])
    well = all(row["well"] == "yes" for row in rows)
    print("all is well" if well else "NOT all is well", flush=True)
    return well


def undisturbed(server: Server, work: Sequence[Request], *, differ: bool = False) -> list[Outcome]:
    """Return the answer to each request alone. Raises RuntimeError without one, or if they are to `differ` and do not."""
    expected = [ask(f"http://127.0.0.1:{server.port}", request) for request in work]
    if failed := [f"{one.kind}: {one.detail}" for one in expected if one.kind != "answered"]:
        raise RuntimeError(f"before the first kill: {failed[:3]}")
    if differ and len({str(one.answer) for one in expected}) < len(work):
        raise RuntimeError("answers are to differ")
    return expected


def storm(
    server: Server,
    work: Sequence[Request],
    count: int,
    judge: Callable[[int, Outcome], None],
    found: Found,
    rng: random.Random,
    roles: tuple[str, ...],
) -> None:
    """Ask for `count` answers with `CLIENTS` clients, the requests of `work` in turn, while processes of `roles` are killed.
    `judge` gets the index of the request and the outcome of each, one at a time, and counts it."""
    url, numbers, lock, processes = f"http://127.0.0.1:{server.port}", iter(range(count)), threading.Lock(), Processes(server)

    def run() -> None:
        while (number := next_number()) is not None:
            at = number % len(work)
            got = _answer(url, work[at], found)
            with lock:
                judge(at, got)

    def next_number() -> int | None:
        with lock:
            return next(numbers, None)

    threads = [threading.Thread(target=run) for _ in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for mark, role in zip(range(BETWEEN // 2, count, BETWEEN), itertools.cycle(roles), strict=False):
        while found.answers < mark and any(thread.is_alive() for thread in threads):
            time.sleep(0.02)
        if any(thread.is_alive() for thread in threads):
            found.kills[processes.hurt(rng, role, "SIGKILL")] += 1
    for thread in threads:
        thread.join()


def _answer(url: str, request: Request, found: Found) -> Outcome:
    """Ask until there is an answer; refusals are counted."""
    deadline = time.monotonic() + 4 * EXCUSE_S
    while (got := ask(url, request)).kind == "refused" and time.monotonic() < deadline:
        found.retried += 1
        time.sleep(0.2)
    return got
