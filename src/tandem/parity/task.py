"""What is computed for a comparison: prompts, and how many tokens follow each of them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import ConfigError
from tandem.system.files import read_text

"""Small, so that a prompt of several chunks stays small too: its logits are kept for every position."""
SHORT, BEYOND = 7, 6
"""Tokens of the short default prompt, and of the long one beyond its second chunk."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """Prompts as token ids, one after the other; greedy tokens follow each."""

    prompts: tuple[tuple[int, ...], ...]
    tokens: int
    """Tokens to produce for each prompt."""
    prefill_chunk: int

    def rows(self, prompt: int) -> int:
        """Positions of a prompt and its tokens that have logits: the last token's are never computed."""
        return len(self.prompts[prompt]) + self.tokens - 1


def default_prompts(vocab_size: int, prefill_chunk: int) -> list[list[int]]:
    """A short prompt and one of more than two chunks, of pseudo-random token ids: the same ones for the same model."""
    rng = random.Random(7)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (SHORT, 2 * prefill_chunk + BEYOND)]


def read_prompts(path: Path, encode: Callable[[str], list[int]]) -> list[list[int]]:
    """Prompts of a file, one a line: text, or token ids as a JSON list. Raises ConfigError."""
    try:
        lines = [line for line in read_text(path).splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: cannot be read: {getattr(error, 'strerror', None) or error}",
                          param="prompts") from error
    if not lines:
        raise ConfigError(f"--prompts {path}: has no lines; write one prompt a line", param="prompts")
    return [_ids(line) or encode(line) for line in lines]


def _ids(line: str) -> list[int] | None:
    try:
        ids = json.loads(line)
    except ValueError:
        return None
    plain = isinstance(ids, list) and ids and all(isinstance(one, int) and not isinstance(one, bool) for one in ids)
    return ids if plain else None


def make_task(prompts: list[list[int]], *, tokens: int, prefill_chunk: int, vocab_size: int, max_context: int) -> Task:
    """A checked task. Raises ConfigError."""
    if tokens < 1:
        raise ConfigError(f"--tokens {tokens}: produce at least 1", param="tokens")
    if prefill_chunk < 1:
        raise ConfigError(f"--prefill-chunk {prefill_chunk}: must be at least 1", param="prefill_chunk")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise ConfigError(f"prompt {i + 1} has no tokens; give at least one", param="prompts")
        if not all(0 <= token < vocab_size for token in prompt):
            raise ConfigError(f"prompt {i + 1} has token ids outside of 0..{vocab_size - 1}", param="prompts")
        if len(prompt) + tokens > max_context:
            raise ConfigError(f"prompt {i + 1} of {len(prompt)} tokens and {tokens} more exceed the context of "
                              f"{max_context}; shorten it, or lower --tokens or --prefill-chunk", param="prompts")
    return Task(prompts=tuple(map(tuple, prompts)), tokens=tokens, prefill_chunk=prefill_chunk)
