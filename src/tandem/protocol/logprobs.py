"""Log probabilities as they travel: of tokens that were produced, and of a prompt's."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct


class TokenLogprob(Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, taken after penalties and before temperature and filters."""

    token: int
    logprob: float
    top: list[tuple[int, float]]
    """The most likely tokens, best first; empty when only the chosen token was asked for."""


class PromptToken(NamedTuple):
    """One token of a prompt, as the model saw it coming."""

    logprob: float
    rank: int
    """1 for the most likely token of its place: one more than there are tokens above it."""
    top: list[tuple[int, float]]
    """The most likely tokens of the place, best first."""


class PromptLogprobs(Struct, frozen=True, array_like=True):
    """Natural-log probabilities that the model itself gives n tokens of a prompt one after the other, each after those
    before it. Packed in little-endian order, as there may be a hundred thousand."""

    k: int = 0
    """How many of the most likely tokens there are in each place."""
    logprobs: bytes = b""
    """float32 [n]: the tokens' own; NaN where the logits are not finite numbers."""
    ranks: bytes = b""
    """int32 [n]"""
    top_logprobs: bytes = b""
    """float32 [n, k], best first."""
    top_tokens: bytes = b""
    """int32 [n, k]"""

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
        """False if some place's logits were not finite numbers."""
        return not any(map(math.isnan, _numbers(self.logprobs, "f")))

    def after(self, places: int) -> PromptLogprobs:
        """Return the entries without the first `places`."""
        own, top = 4 * places, 4 * places * self.k
        return PromptLogprobs(self.k, self.logprobs[own:], self.ranks[own:], self.top_logprobs[top:], self.top_tokens[top:])


def _numbers(data: bytes, kind: Literal["f", "i"]) -> tuple[Any, ...]:
    return struct.unpack(f"<{len(data) // 4}{kind}", data)


def joined(parts: Sequence[PromptLogprobs]) -> PromptLogprobs:
    """Several that follow one another, all with the same k."""
    return PromptLogprobs(
        parts[0].k if parts else 0,
        b"".join(one.logprobs for one in parts),
        b"".join(one.ranks for one in parts),
        b"".join(one.top_logprobs for one in parts),
        b"".join(one.top_tokens for one in parts),
    )
