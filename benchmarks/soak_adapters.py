"""Ten LoRA adapters in one batch, in one layout after the other, while ranks and engines are killed and others come and go.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import httpx
from harness import Server
from soak_requests import Outcome, Request
from soak_storm import PLACES, Found, over_layouts, storm, undisturbed

from tandem.testing import tiny_model

ADAPTERS = 10
RANK = 16
NEW = 60
"""Tokens of each answer."""
PROMPTS = ("the red sea", "one two one two one", "a stone that is not there " * 12)
PAUSE_S = 0.3
"""Between a load and the next unload."""
CHANGES = "loads and unloads"
"""Column of the adapters that were loaded or unloaded meanwhile."""


def adapters(directory: Path, made: Callable[..., Path], count: int, seed: int, device: str, folder: Path) -> bool:
    """Ask for `count` answers over all layouts, and print a table; True when all is well. `made` writes an adapter for a model
    into a directory, of a `rank` and a `scale`."""
    model = tiny_model(directory / "base", dtype="float32", config={"max_position_embeddings": 4096})
    *kept, passing = [
        made(model, directory / f"adapter{i}", rank=RANK if i % 2 else 4, scale=0.4 + 0.2 * i) for i in range(ADAPTERS + 1)
    ]

    def play(server: Server, share: int, rng: random.Random, roles: tuple[str, ...]) -> Found:
        for path in kept:
            if (answer := _change(server, "load", path)).status_code != 200:
                raise RuntimeError(answer.text)
        return _stormed(server, share, [path.name for path in kept], passing, rng, roles)

    limits = {"enable_lora": True, "max_loras": ADAPTERS + 1, "max_lora_rank": RANK}
    return over_layouts("adapters", PLACES, model, play, count=count, seed=seed, device=device, folder=folder, **limits)


def _stormed(server: Server, count: int, names: list[str], passing: Path, rng: random.Random, roles: tuple[str, ...]) -> Found:
    work = [
        Request(
            "/v1/completions", {**body, "model": name, "prompt": prompt, "max_tokens": NEW, "ignore_eos": True, "logprobs": 1}
        )
        for name in names
        for prompt, body in zip(PROMPTS, ({"temperature": 0}, {"seed": 7}, {"temperature": 0, "stream": True}), strict=True)
    ]
    rng.shuffle(work)
    expected, found = undisturbed(server, work, differ=True), Found(figures={CHANGES: 0})

    def judge(at: int, got: Outcome) -> None:
        found.compare(work[at].body["model"], got, expected[at])

    ended = threading.Event()

    def change() -> None:
        while not ended.wait(PAUSE_S):
            for verb in ("load", "unload"):
                found.figures[CHANGES] += _change(server, verb, passing).status_code == 200

    changing = threading.Thread(target=change)
    changing.start()
    storm(server, work, count, judge, found, rng, roles)
    ended.set()
    changing.join()
    if not found.figures[CHANGES]:
        found.wrong["lost"].append("no adapter was loaded or unloaded meanwhile")
    return found


def _change(server: Server, verb: str, path: Path) -> httpx.Response:
    body = {"lora_name": path.name, **({"lora_path": str(path)} if verb == "load" else {})}
    return httpx.post(f"http://127.0.0.1:{server.port}/v1/{verb}_lora_adapter", json=body, timeout=240)
