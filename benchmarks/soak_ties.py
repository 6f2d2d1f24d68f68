"""Whether two answers to one request part at a tie: a draw that float32 rounding decides.

The same prompt computed in other chunks, or beside other rows, has logits that differ in the last bits. A seeded draw
takes a token by comparing a random number with running sums of probabilities; where the number lies within rounding of
one of these sums, either of two tokens is right. Here the request is computed again, alone, and at each token the
logits are moved by as much as rounding does: answers that follow from these tokens are all right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx

from tandem.checkpoints.resolve import resolve
from tandem.loading.stage import StageModel, load_stage
from tandem.models.description import describe
from tandem.protocol.request import SamplingParams
from tandem.runner.sampler import Sampler
from tandem.text.tokenizer import Tokenizer, load_tokenizer

NOISE = 1e-5
"""Logits of float32 in another order of sums differ by about so much (standard deviation)."""
DRAWS = 64
"""Moved logits that are tried for each token."""
NAMES = [str(number) for number in range(DRAWS)]
MOST = 8
"""Answers that are followed at most."""
FIELDS = {
    "max_tokens",
    "temperature",
    "seed",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "ignore_eos",
}


def tied(model: Path, body: Mapping[str, Any], got: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether both answers are right, for a request of token ids or messages alone to the main model; False
    where that cannot be told."""
    if body.get("model") != "default" or body.keys() - FIELDS - {"model", "prompt", "messages", "stream", "n"}:
        return False
    stage, tokenizer = _loaded(model)
    prompt = body["prompt"] if "prompt" in body else tokenizer.render_chat(body["messages"])
    if got.keys() != expected.keys() or not isinstance(prompt, list):
        return False
    for name in (name for name in got if got[name] != expected[name]):
        what, _, choice = name.partition(" ")
        fields = {field: body[field] for field in FIELDS & body.keys()}
        params = SamplingParams(**{**fields, "seed": fields.get("seed", 0) + int(choice or 0)})
        if what != "text" or not {got[name], expected[name]} <= _texts(stage, tokenizer, prompt, params):
            return False
    return True


def _texts(stage: StageModel, tokenizer: Tokenizer, prompt: list[int], params: SamplingParams) -> set[str]:
    """Return the texts that follow a prompt, as ties have it."""
    texts, left = set(), [list[int]()]
    while left and len(texts) < MOST:
        tokens, others = _follow(stage, prompt, left.pop(), params)
        texts.add(tokenizer.decode(tokens))
        left += others
    return texts


def right(model: Path, prompt: str | list[dict[str, str]], params: SamplingParams, tokens: Sequence[bytes]) -> bool:
    """Return whether an answer of these tokens (each as its bytes) follows from a prompt or messages, as ties have it."""
    stage, tokenizer = _loaded(model)
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.render_chat(prompt)
    assert isinstance(ids, list)
    mx.random.seed(0)
    caches, fed, output = stage.make_caches(), ids, list[int]()
    sampler = _sampler(stage, params, ids, output)
    for wanted in tokens:
        drawn = _drawn(stage.head(stage.forward(mx.array([fed]), caches)[:, -1:])[:, -1], sampler)
        token = next((token for token in set(drawn) if tokenizer.token_bytes(token) == wanted), None)
        if token is None:
            return False
        output.append(token)
        if set(drawn) != {token}:
            sampler = _sampler(stage, params, ids, output)
        fed = [token]
    return True


def _sampler(stage: StageModel, params: SamplingParams, prompt: list[int], output: list[int]) -> Sampler:
    """Return a sampler each of whose rows follows this output."""
    sampler = Sampler(stage.vocab_size, ())
    for name in NAMES:
        sampler.add(name, params, params.seed or 0, prompt + output, len(prompt))
    return sampler


def _drawn(logits: mx.array, sampler: Sampler) -> list[int]:
    """Return tokens drawn from logits [1, V] that are moved by noise, but for the first."""
    noise = NOISE * mx.random.normal((len(NAMES), logits.shape[-1]))
    noise[0] = 0.0
    drawn: list[int] = sampler.sample(logits + noise, NAMES, {}).tokens.tolist()
    return drawn


@lru_cache(1)
def _loaded(model: Path) -> tuple[StageModel, Tokenizer]:
    files = resolve(str(model))
    description = describe(files)
    return load_stage(files, description, range(description.num_layers)), load_tokenizer(files)


def _follow(stage: StageModel, prompt: list[int], forced: list[int], params: SamplingParams) -> tuple[list[int], list[list[int]]]:
    """Return the tokens of an answer that begins with `forced`, and beginnings of others that part from it at a tie."""
    mx.random.seed(0)
    sampler = _sampler(stage, params, prompt, [])
    caches, fed, tokens = stage.make_caches(), prompt, list[int]()
    others: list[list[int]] = []
    while len(tokens) < params.max_tokens:
        drawn = _drawn(stage.head(stage.forward(mx.array([fed]), caches)[:, -1:])[:, -1], sampler)
        at = len(tokens)
        tokens.append(forced[at] if at < len(forced) else drawn[0])
        if at >= len(forced):
            others += [[*tokens[:at], token] for token in sorted(set(drawn) - {drawn[0]})]
        if set(drawn) != {tokens[at]}:
            sampler = _sampler(stage, params, prompt, tokens)
        fed = tokens[-1:]
    return tokens, others
