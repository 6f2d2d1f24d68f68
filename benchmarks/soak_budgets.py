"""Answers with thinking budgets in one layout after the other while ranks and engines are killed.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed. Its reasoning is
counted from its tokens (`logprobs`), not from what `usage` says.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import httpx
from harness import Server, table, tandem_server
from soak_processes import Processes
from soak_requests import Outcome, Request, ask, same
from soak_schedule import LAYOUTS
from soak_tally import EXCUSE_S
from soak_ties import right
from tokenizers import AddedToken, Tokenizer

from tandem.checkpoints.resolve import resolve
from tandem.protocol.request import SamplingParams
from tandem.protocol.thinking import ThinkingBudget, ThinkingTokens
from tandem.testing import CHAT_TEMPLATE, tiny_model
from tandem.text.tokenizer import load_tokenizer

PLACES: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "one rank": ({}, ("engine",)),
    "pp 2": (LAYOUTS["pp"], ("rank", "engine")),
    "tp 2": (LAYOUTS["tp"], ("rank", "engine")),
    "dp 2": (LAYOUTS["dp"], ("engine",)),
}
"""Options of `tandem serve` and what is killed, by layout."""
OPENING, CLOSING = "<think>", "</think>"
MESSAGE = "That is enough. So:"
NEW = 120
"""Tokens of each answer."""
DIFFERENT = 25
"""Requests of a layout; each is sent several times."""
CLIENTS = 6
BETWEEN = 12
"""Answers between two kills."""
FIELDS = ("thinking_token_budget", "thinking_budget", "reasoning_budget", "reasoning")


def thinking_model(directory: Path) -> Path:
    """Write a tiny random model whose tags around reasoning are tokens of its own, and whose template opens with one."""
    model = tiny_model(directory / "thinks", dtype="float32", config={"vocab_size": 544, "max_position_embeddings": 4096})
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(tag, special=True, normalized=False) for tag in (OPENING, CLOSING)])
    tokenizer.save(str(model / "tokenizer.json"))
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = CHAT_TEMPLATE + f"{{# {CLOSING} #}}{{% if add_generation_prompt %}}{OPENING}\n{{% endif %}}"
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    return model


def budgeted(rng: random.Random) -> list[tuple[Request, int, str]]:
    """Return requests, each with its budget in tokens and its closing sentence."""
    made = []
    for number in range(DIFFERENT):
        budget, said = rng.choice((0, 1, 7, 20, 45, 80)), MESSAGE if number % 2 else ""
        how = {"temperature": 0} if number % 3 == 0 else {"temperature": 0.8, "seed": number}
        words = " ".join(rng.choice(("one", "two", "red", "sea")) for _ in range(rng.choice((3, 30, 200))))
        field = FIELDS[number % len(FIELDS)]
        body: dict[str, Any] = {
            "model": "default",
            "max_tokens": NEW,
            "ignore_eos": True,
            "stream": number % 2 == 0,
            field: {"max_tokens": budget} if field == "reasoning" else budget,
            **({"reasoning_budget_message": said} if said else {}),
            **how,
        }
        if field == "thinking_token_budget":
            path, body = "/v1/completions", {**body, "prompt": f"{words}{OPENING}so", "logprobs": 1}
        else:
            path, body = "/v1/chat/completions", {**body, "messages": [{"role": "user", "content": words}], "logprobs": True}
        made.append((Request(path, body), budget, said))
    return made


@dataclasses.dataclass
class Found:
    """Findings in one layout."""

    kills: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    retried: int = 0
    answers: int = 0
    over: list[str] = dataclasses.field(default_factory=list)
    others: list[tuple[Request, int, str, dict[str, Any], dict[str, Any]]] = dataclasses.field(default_factory=list)
    """Requests with their budgets and sentences whose answers are not as undisturbed, and both answers."""
    tied: int = 0
    """Of these, those that rounding decides."""
    different: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)
    closed: int = 0
    """Answers whose reasoning ended within them."""
    most: int = 0
    """Most reasoning tokens beyond a budget, closing sentences among them."""

    @property
    def well(self) -> bool:
        """Whether everything held, and something was killed."""
        return bool(self.kills) and not (self.over or self.different or self.lost)


def _of(request: Request, budget: int, said: str, model: Path) -> SamplingParams:
    """Return what the rank that samples gets for a request."""
    tokenizer = load_tokenizer(resolve(str(model)))
    opening, closing = (tuple(tokenizer.encode(tag, False)) for tag in (OPENING, CLOSING))
    thinking = ThinkingBudget(budget, ThinkingTokens(opening, closing, begun=True), tuple(tokenizer.encode(said, False)))
    fields = {name: request.body[name] for name in ("max_tokens", "temperature", "seed", "ignore_eos") if name in request.body}
    return SamplingParams(**fields, thinking=thinking)


def _tied(model: Path, request: Request, budget: int, said: str, *answers: dict[str, Any]) -> bool:
    """Return whether rounding decides between the answers: each follows from the request (soak_ties.py)."""
    params, prompt = _of(request, budget, said, model), request.body.get("prompt") or request.body["messages"]
    return all(right(model, prompt, params, [token.encode("latin-1") for token in _tokens_of(answer)]) for answer in answers)


def _tokens_of(answer: dict[str, Any]) -> list[str]:
    """Return the tokens of an answer, a character for each byte."""
    return [json.loads(line) for line in answer["tokens 0"].splitlines()]


def budgets(model: Path, count: int, seed: int, device: str, folder: Path) -> bool:
    """Ask for `count` answers over all layouts, and print a table; True when all is well."""
    rows, well = [], True
    for number, (name, (flags, roles)) in enumerate(PLACES.items()):
        share = count // len(PLACES) + (number < count % len(PLACES))
        log = folder / f"budgets-{name.replace(' ', '')}.log"
        began = time.monotonic()
        with tandem_server(model, 1, log=log, max_restarts=1000, start_timeout=120, device=device, **flags) as server:
            found = _storm(server, share, random.Random(f"{seed}/{name}"), roles)
            codes = server.end()
        for request, budget, said, got, expected in found.others:
            if _tied(model, request, budget, said, got, expected):
                found.tied += 1
            else:
                found.different.append(f"{request.name}: {_difference(got, expected)}")
        if "Traceback" in log.read_text(errors="replace") or codes != [0]:
            found.lost.append(f"ended with {codes}, or a traceback: see {log}")
        well &= found.well
        killed = ", ".join(f"{times} x {what}" for what, times in found.kills.items())
        wrong = (len(found.over), len(found.different), len(found.lost))
        figures = (found.answers, found.closed, found.most, found.tied, *wrong, found.retried)
        rows.append([name, round(time.monotonic() - began), killed, *figures, "yes" if found.well else "NO"])
        for kind in ("over", "different", "lost"):
            for text in getattr(found, kind)[:5]:
                print(f"{name}: {kind}: {text}", flush=True)
    columns = (
        "layout",
        "s",
        "kills",
        "answers",
        "closed",
        "beyond, at most",
        "tied",
        "over",
        "different",
        "lost",
        "asked again",
        "well",
    )
    table(columns, rows)
    print("all is well" if well else "NOT all is well", flush=True)
    return well


def _storm(server: Server, count: int, rng: random.Random, roles: tuple[str, ...]) -> Found:
    url, work, found = f"http://127.0.0.1:{server.port}", budgeted(rng), Found()
    tokens = {said: _tokens(url, said) for said in ("", MESSAGE)}
    expected = [ask(url, request) for request, _, _ in work]
    for (request, _, _), got in zip(work, expected, strict=True):
        if got.kind != "answered":
            raise RuntimeError(f"before the first kill: {request.name} {got.kind}: {got.detail}")

    def judge(number: int, got: Outcome) -> None:
        request, budget, said = work[number % len(work)]
        found.answers += 1
        _judge(request, budget, said, tokens[said], got, expected[number % len(work)], found)

    storm(server, [request for request, _, _ in work], count, judge, found, rng, roles)
    return found


class Counted(Protocol):
    """Counts of a storm."""

    kills: collections.Counter[str]
    retried: int
    answers: int


def storm(
    server: Server,
    work: Sequence[Request],
    count: int,
    judge: Callable[[int, Outcome], None],
    found: Counted,
    rng: random.Random,
    roles: tuple[str, ...],
) -> None:
    """Ask for `count` answers with `CLIENTS` clients, the requests of `work` in turn, while processes of `roles` are killed.
    `judge` gets the number and the outcome of each, one at a time, and counts it."""
    url, numbers, lock, processes = f"http://127.0.0.1:{server.port}", iter(range(count)), threading.Lock(), Processes(server)

    def run() -> None:
        while (number := next_number()) is not None:
            got = _answer(url, work[number % len(work)], found)
            with lock:
                judge(number, got)

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


def _tokens(url: str, text: str) -> int:
    body = {"model": "default", "prompt": text, "add_special_tokens": False}
    return len(httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"]) if text else 0


def _answer(url: str, request: Request, found: Counted) -> Outcome:
    """Ask until there is an answer; refusals are counted."""
    deadline = time.monotonic() + 4 * EXCUSE_S
    while (got := ask(url, request)).kind == "refused" and time.monotonic() < deadline:
        found.retried += 1
        time.sleep(0.2)
    return got


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return where two answers part, and the log probabilities there."""
    (ours, here), (others, there) = (
        (answer.get("tokens 0", "").splitlines(), answer.get("logprobs 0", [])) for answer in (mine, theirs)
    )
    at = next((n for n, pair in enumerate(zip(ours, others, strict=False)) if len(set(pair)) > 1), None)
    if at is None:
        return f"same tokens, log probabilities up to {max(abs(a - b) for a, b in zip(here, there, strict=False)):.4f} apart"
    return f"token {at}: {ours[at]} ({here[at]:.5f}) in place of {others[at]} ({there[at]:.5f})"


def _judge(request: Request, budget: int, said: str, sentence: int, got: Outcome, expected: Outcome, found: Found) -> None:
    if got.kind != "answered" or got.twice:
        found.lost.append(f"{request.name}: {got.kind} {got.detail}")
        return
    if not same(got.answer, expected.answer):
        found.others.append((request, budget, said, got.answer, expected.answer))
    tokens = _tokens_of(got.answer)
    found.closed += CLOSING in tokens
    spent = tokens.index(CLOSING) if CLOSING in tokens else len(tokens)
    found.most = max(found.most, spent - budget)
    if spent > budget + sentence or len(tokens) != NEW or OPENING in tokens[spent:]:
        found.over.append(f"{request.name}: {spent} of {len(tokens)} tokens for a budget of {budget} and {sentence}")
