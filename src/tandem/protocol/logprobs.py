"""Log probabilities of output and prompt tokens, as messages carry them."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, after penalties and before temperature and filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """(Token, log probability) of the most likely tokens, best first; empty if only the chosen token was requested."""


class PromptToken(NamedTuple):
    """Log probability of one prompt token given the tokens before it."""

    logprob: float
    rank: int
    """Rank of the token among all tokens at its position; 1 is the most likely."""
    top: list[tuple[int, float]]
    """(Token, log probability) of the most likely tokens at the position, best first."""


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Natural-log probabilities of n consecutive prompt tokens, each given the tokens before it. Packed little-endian, as
    prompts may have a hundred thousand tokens."""

    k: int = 0
    """Number of most likely tokens stored per position."""
    logprobs: bytes = b""
    """float32 [n]: log probability of each token; NaN where its logits are not finite."""
    ranks: bytes = b""
    """int32 [n]: rank of each token, 1 for the most likely."""
    top_logprobs: bytes = b""
    """float32 [n, k]: log probabilities of the most likely tokens, best first."""
    top_tokens: bytes = b""
    """int32 [n, k]: ids of the most likely tokens."""

    def __len__(self) -> int:
        return len(self.logprobs) // 4

    def __iter__(self) -> Iterator[PromptToken]:
        values, best = struct.Struct(f"<{self.k}f"), struct.Struct(f"<{self.k}i")
        for n, (logprob, rank) in enumerate(zip(_numbers(self.logprobs, "f"), _numbers(self.ranks, "i"), strict=True)):
            place = n * values.size
            tops = best.unpack_from(self.top_tokens, place), values.unpack_from(self.top_logprobs, place)
            top = [(token, value) for token, value in zip(*tops, strict=True) if value > -math.inf]
            yield PromptToken(logprob, rank, top)

    @property
    def finite(self) -> bool:
        """False if the logits of some position are not finite."""
        return not any(map(math.isnan, _numbers(self.logprobs, "f")))

    def after(self, places: int) -> PromptLogprobs:
        """Return a copy without the first `places` tokens."""
        own, top = 4 * places, 4 * places * self.k
        return PromptLogprobs(self.k, self.logprobs[own:], self.ranks[own:], self.top_logprobs[top:], self.top_tokens[top:])


def _numbers(data: bytes, kind: Literal["f", "i"]) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(data) // 4}{kind}", data)


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Concatenate consecutive parts, all with the same k."""
    return PromptLogprobs(
        parts[0].k if parts else 0,
        b"".join(one.logprobs for one in parts),
        b"".join(one.ranks for one in parts),
        b"".join(one.top_logprobs for one in parts),
        b"".join(one.top_tokens for one in parts),
    )
