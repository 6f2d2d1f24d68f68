"""Ten LoRA adapters in one batch, in one layout after the other, while ranks and engines are killed and others come and go.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed.
"""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
from harness import Server, table, tandem_server
from soak_budgets import PLACES, storm
from soak_requests import Outcome, Request, ask, same

from tandem.testing import tiny_model

ADAPTERS = 10
RANK = 16
NEW = 60
"""Tokens of each answer."""
PROMPTS = ("the red sea", "one two one two one", "a stone that is not there " * 12)
PAUSE_S = 0.3
"""Between a load and the next unload."""


@dataclasses.dataclass
class Found:
    """Findings in one layout."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    retried: int = 0
    answers: int = 0
    changes: int = 0
    """Adapters that were loaded or unloaded meanwhile."""
    different: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)


def adapters(directory: Path, made: Callable[..., Path], count: int, seed: int, device: str, folder: Path) -> bool:
    """Ask for `count` answers over all layouts, and print a table; True when all is well. `made` writes an adapter for a model
    into a directory, of a `rank` and a `scale`."""
    model = tiny_model(directory / "base", dtype="float32", config={"max_position_embeddings": 4096})
    *kept, passing = [
        made(model, directory / f"adapter{i}", rank=RANK if i % 2 else 4, scale=0.4 + 0.2 * i) for i in range(ADAPTERS + 1)
    ]
    rows, well = [], True
    for number, (name, (flags, roles)) in enumerate(PLACES.items()):
        share, began, found = count // len(PLACES) + (number < count % len(PLACES)), time.monotonic(), Found()
        log = folder / f"adapters-{name.replace(' ', '')}.log"
        more = {"enable_lora": True, "max_loras": ADAPTERS + 1, "max_lora_rank": RANK, **flags}
        with tandem_server(model, 1, log=log, max_restarts=1000, start_timeout=120, device=device, **more) as server:
            for path in kept:
                if (answer := _change(server, "load", path)).status_code != 200:
                    raise RuntimeError(answer.text)
            _stormed(server, share, [path.name for path in kept], passing, found, random.Random(f"{seed}/{name}"), roles)
            codes = server.end()
        if "Traceback" in log.read_text(errors="replace") or codes != [0]:
            found.lost.append(f"ended with {codes}, or a traceback: see {log}")
        fine = bool(found.kills and found.changes) and not (found.different or found.lost)
        well &= fine
        killed = ", ".join(f"{times} x {what}" for what, times in found.kills.items())
        figures = (found.answers, found.changes, len(found.different), len(found.lost), found.retried)
        rows.append([name, round(time.monotonic() - began), killed, *figures, "yes" if fine else "NO"])
        for text in (*found.different[:5], *found.lost[:5]):
            print(f"{name}: {text}", flush=True)
    table(("layout", "s", "kills", "answers", "loads and unloads", "different", "lost", "asked again", "well"), rows)
    print("all is well" if well else "NOT all is well", flush=True)
    return well


def _stormed(
    server: Server, count: int, names: list[str], passing: Path, found: Found, rng: random.Random, roles: tuple[str, ...]
) -> None:
    work = [
        Request(
            "/v1/completions", {**body, "model": name, "prompt": prompt, "max_tokens": NEW, "ignore_eos": True, "logprobs": 1}
        )
        for name in names
        for prompt, body in zip(PROMPTS, ({"temperature": 0}, {"seed": 7}, {"temperature": 0, "stream": True}), strict=True)
    ]
    rng.shuffle(work)
    expected = [ask(f"http://127.0.0.1:{server.port}", request) for request in work]
    if len({str(one.answer) for one in expected}) < len(work) or any(one.kind != "answered" for one in expected):
        raise RuntimeError("adapters are to answer, and to differ")

    def judge(number: int, got: Outcome) -> None:
        at = number % len(work)
        found.answers += 1
        if got.kind != "answered" or got.twice:
            found.lost.append(f"{work[at].body['model']}: {got.kind} {got.detail}")
        elif not same(got.answer, expected[at].answer):
            found.different.append(f"{work[at].body['model']}: not as alone")

    ended = threading.Event()

    def change() -> None:
        while not ended.wait(PAUSE_S):
            for verb in ("load", "unload"):
                found.changes += _change(server, verb, passing).status_code == 200

    changing = threading.Thread(target=change)
    changing.start()
    storm(server, work, count, judge, found, rng, roles)
    ended.set()
    changing.join()


def _change(server: Server, verb: str, path: Path) -> httpx.Response:
    body = {"lora_name": path.name, **({"lora_path": str(path)} if verb == "load" else {})}
    return httpx.post(f"http://127.0.0.1:{server.port}/v1/{verb}_lora_adapter", json=body, timeout=240)
