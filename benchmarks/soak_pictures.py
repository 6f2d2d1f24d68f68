"""Text, one picture and three pictures in one batch, in one layout after the other, while ranks and engines are killed.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import random
import time
from pathlib import Path

from harness import Server, table, tandem_server
from soak_budgets import PLACES, storm
from soak_requests import Outcome, Request, ask, same

from processors import encoded, noise, see
from seeing import IMAGE, seeing_model

FAMILY = "mistral3"
NEW = 40
"""Tokens of each answer."""
PROMPTS = ("the red sea", "one two one two one", "a stone that is not there " * 8)
COUNTS = (0, 1, 3)
"""Pictures of a request."""


@dataclasses.dataclass
class Found:
    """Findings in one layout."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    retried: int = 0
    answers: int = 0
    seen: int = 0
    """Pictures in them."""
    different: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)


def pictures(directory: Path, count: int, seed: int, device: str, folder: Path) -> bool:
    """Ask for `count` answers over all layouts, and print a table; True when all is well."""
    model = seeing_model(directory / "sees", FAMILY)
    see(model, FAMILY, IMAGE)
    (model / "preprocessor_config.json").write_text(
        json.dumps({"image_processor_type": "PixtralImageProcessor", "patch_size": 4, "size": {"longest_edge": 16}})
    )
    rows, well = [], True
    for number, (name, (flags, roles)) in enumerate(PLACES.items()):
        share, began, found = count // len(PLACES) + (number < count % len(PLACES)), time.monotonic(), Found()
        log = folder / f"pictures-{name.replace(' ', '')}.log"
        with tandem_server(model, 1, log=log, max_restarts=1000, start_timeout=120, device=device, **flags) as server:
            _stormed(server, share, found, random.Random(f"{seed}/{name}"), roles)
            codes = server.end()
        if "Traceback" in log.read_text(errors="replace") or codes != [0]:
            found.lost.append(f"ended with {codes}, or a traceback: see {log}")
        fine = bool(found.kills and found.seen) and not (found.different or found.lost)
        well &= fine
        killed = ", ".join(f"{times} x {what}" for what, times in found.kills.items())
        figures = (found.answers, found.seen, len(found.different), len(found.lost), found.retried)
        rows.append([name, round(time.monotonic() - began), killed, *figures, "yes" if fine else "NO"])
        for text in (*found.different[:5], *found.lost[:5]):
            print(f"{name}: {text}", flush=True)
    table(("layout", "s", "kills", "answers", "pictures", "different", "lost", "asked again", "well"), rows)
    print("all is well" if well else "NOT all is well", flush=True)
    return well


def _stormed(server: Server, count: int, found: Found, rng: random.Random, roles: tuple[str, ...]) -> None:
    work = []
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
    expected = [ask(f"http://127.0.0.1:{server.port}", request) for request in work]
    if any(one.kind != "answered" for one in expected):
        raise RuntimeError(f"before the first kill: {[one.detail for one in expected if one.kind != 'answered'][:3]}")
    if len({str(one.answer) for one in expected}) < len(work):
        raise RuntimeError("answers are to differ")

    def judge(number: int, got: Outcome) -> None:
        at = number % len(work)
        many = len(work[at].body["messages"][0]["content"]) - 1
        found.answers, found.seen = found.answers + 1, found.seen + many
        if got.kind != "answered" or got.twice:
            found.lost.append(f"{many} pictures: {got.kind} {got.detail}")
        elif not same(got.answer, expected[at].answer):
            found.different.append(f"{many} pictures: not as alone")

    storm(server, work, count, judge, found, rng, roles)
