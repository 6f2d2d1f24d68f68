"""Answers with thinking budgets in one layout after the other while ranks and engines are killed.

Each answer is compared, token by token, with the one that the same server gave alone and undisturbed. Its reasoning is
counted from its tokens (`logprobs`), not from what `usage` says.
"""

from __future__ import annotations

import json
import random
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from harness import Server
from soak_requests import Outcome, Request, same
from soak_storm import PLACES, Found, over_layouts, storm, undisturbed
from soak_ties import right
from tokenizers import AddedToken, Tokenizer

from tandem.checkpoints.resolve import resolve
from tandem.protocol.request import SamplingParams
from tandem.protocol.thinking import ThinkingBudget, ThinkingTokens
from tandem.testing import CHAT_TEMPLATE, tiny_model
from tandem.text.tokenizer import load_tokenizer

OPENING, CLOSING = "<think>", "</think>"
MESSAGE = "That is enough. So:"
NEW = 120
"""Tokens of each answer."""
DIFFERENT = 25
"""Requests of a layout; each is sent several times."""
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


CLOSED, BEYOND, TIED = "closed", "beyond, at most", "tied"
"""Columns: answers whose reasoning ended within them, most reasoning tokens beyond a budget (closing sentences among them), and
answers that rounding decides."""


class _Budgets(Found):
    """Findings in one layout."""

    def __init__(self, model: Path) -> None:
        super().__init__(figures={CLOSED: 0, BEYOND: 0, TIED: 0}, wrong={"over": [], "different": [], "lost": []})
        self._model = model
        self.others: list[tuple[Request, int, str, dict[str, Any], dict[str, Any]]] = []
        """Requests with their budgets and sentences whose answers are not as undisturbed, and both answers."""

    def settle(self) -> None:
        """Tell answers that rounding decides from different ones."""
        for request, budget, said, got, expected in self.others:
            if _tied(self._model, request, budget, said, got, expected):
                self.figures[TIED] += 1
            else:
                self.wrong["different"].append(f"{request.name}: {_difference(got, expected)}")

    def judge(self, request: Request, budget: int, said: str, sentence: int, got: Outcome, expected: Outcome) -> None:
        """Count an answer and its reasoning. `sentence`: tokens of the closing sentence `said`."""
        if self.lost(request.name, got):
            return
        if not same(got.answer, expected.answer):
            self.others.append((request, budget, said, got.answer, expected.answer))
        tokens = _tokens_of(got.answer)
        self.figures[CLOSED] += CLOSING in tokens
        spent = tokens.index(CLOSING) if CLOSING in tokens else len(tokens)
        self.figures[BEYOND] = max(self.figures[BEYOND], spent - budget)
        if spent > budget + sentence or len(tokens) != NEW or OPENING in tokens[spent:]:
            told = f"{spent} of {len(tokens)} tokens for a budget of {budget} and {sentence}"
            self.wrong["over"].append(f"{request.name}: {told}")


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
    play = partial(_stormed, model)
    return over_layouts("budgets", PLACES, model, play, count=count, seed=seed, device=device, folder=folder)


def _stormed(model: Path, server: Server, count: int, rng: random.Random, roles: tuple[str, ...]) -> Found:
    made, found = budgeted(rng), _Budgets(model)
    work = [request for request, _, _ in made]
    tokens = {said: _tokens(f"http://127.0.0.1:{server.port}", said) for said in ("", MESSAGE)}
    expected = undisturbed(server, work)

    def judge(at: int, got: Outcome) -> None:
        request, budget, said = made[at]
        found.judge(request, budget, said, tokens[said], got, expected[at])

    storm(server, work, count, judge, found, rng, roles)
    return found


def _tokens(url: str, text: str) -> int:
    body = {"model": "default", "prompt": text, "add_special_tokens": False}
    return len(httpx.post(f"{url}/tokenize", json=body, timeout=60).json()["tokens"]) if text else 0


def _difference(mine: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Return where two answers part, and the log probabilities there."""
    (ours, here), (others, there) = (
        (answer.get("tokens 0", "").splitlines(), answer.get("logprobs 0", [])) for answer in (mine, theirs)
    )
    at = next((n for n, pair in enumerate(zip(ours, others, strict=False)) if len(set(pair)) > 1), None)
    if at is None:
        return f"same tokens, log probabilities up to {max(abs(a - b) for a, b in zip(here, there, strict=False)):.4f} apart"
    return f"token {at}: {ours[at]} ({here[at]:.5f}) in place of {others[at]} ({there[at]:.5f})"
