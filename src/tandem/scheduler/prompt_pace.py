"""How many tokens of prompts a step may have while others decode: chunks by time, not by tokens alone. Pure.

What steps take is given to us as data. A chunk is the largest one halved as often as it takes to keep to the time, so
that ranks see few shapes; plans carry it, and so it is the same on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from tandem.protocol.step import StepPlan
from tandem.scheduler.sequence import Sequence

STEPS = 10.0
"""Steps of decoding that a chunk may take where no time was set."""
LEAST = 32
"""Tokens below which a chunk is not halved: a pass reads all weights however few it has."""
SLACK = 1.25
"""How many times the time it may take before it is halved; it is doubled where that keeps to the time itself."""
MOST_AHEAD = 20.0
"""Steps of decoding for which embeddings pause at most, however long one of their steps took."""
LEARN = 0.2
"""Weight of the latest step in what steps cost."""
ODD = 4.0
"""How many times more than usual a step can seem to have cost: beyond that it was held up by something else."""


class PromptPace:
    """Follows what decoding and prompts cost lately."""

    def __init__(self, limit_s: float | None = None) -> None:
        """`limit_s`: seconds that a chunk may take; None: `STEPS` times a step of decoding; 0: without end."""
        self._limit_s = limit_s
        self._halvings = 0
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._alone: tuple[int, float] | None = None
        """Tokens and seconds of the largest prompt that was computed while nobody decoded."""
        self._prompted: dict[int, float] = {}
        """When the last result of a step with prompts came, by micro-batch."""
        self._embedded_at = -math.inf
        """When the last result of a step with texts to embed came."""
        self._ahead_s = 0.0
        """Time that embeddings have had beside streams, less that of decoding since."""

    def chunk(self, most: int, beside: Iterable[Sequence]) -> int:
        """Tokens of prompts in the next step, `beside` these sequences; `most` as long as nothing is known or none of
        them decodes."""
        limit_s, token_s = self.limit_s, self.token_s
        if limit_s is None or token_s is None or not _streams(beside):
            return most
        while token_s * self._halved(most) > limit_s * SLACK and self._halved(most) > LEAST:
            self._halvings += 1
        while self._halvings and token_s * (most >> (self._halvings - 1)) <= limit_s:
            self._halvings -= 1
        return self._halved(most)

    def embeds(self, beside: Iterable[Sequence]) -> bool:
        """Whether the next step may have texts to embed: beside streams they get no more time than decoding does, so
        that streams run at half of their speed at least."""
        return self._ahead_s <= 0.0 or not _streams(beside)

    @property
    def token_s(self) -> float | None:
        """Seconds that a token of a prompt adds to a step; None while that is not known."""
        if self._token_s is not None or self._alone is None:
            return self._token_s
        tokens, seconds = self._alone
        return max(seconds - (self._decode_s or 0.0), 0.0) / tokens

    @property
    def limit_s(self) -> float | None:
        """Seconds that a chunk may take; None where there is no limit, or it is not known yet."""
        if self._limit_s is None:
            return None if self._decode_s is None else STEPS * self._decode_s
        return self._limit_s or None

    def took(
        self, plan: StepPlan, now: float | None, seconds: float | None, busy_s: float, under_way: Collection[StepPlan]
    ) -> None:
        """The plan's result came `now`, `seconds` after the one before it in its micro-batch, None where that says nothing;
        ranks were busy with it for `busy_s`. `under_way`: other plans."""
        tokens = sum(op.count for op in plan.prefill)
        embeds = any(op.pooling is not None for op in plan.prefill)
        if plan.decode and now is not None and seconds is not None:
            self._charge(
                seconds,
                embeds
                or self._embedded_at >= now - seconds
                or any(op.pooling is not None for one in under_way for op in one.prefill),
            )
            if tokens >= LEAST:
                self._token_s = _learnt(self._token_s, max(seconds - (self._decode_s or 0.0), 0.0) / tokens)
            elif not tokens and not self._disturbed(plan, now - seconds, under_way):
                self._decode_s = _learnt(self._decode_s, seconds)
        elif not plan.decode and busy_s > 0 and tokens >= (self._alone or (LEAST, 0.0))[0]:
            self._alone = tokens, busy_s
        if tokens and now is not None:
            self._prompted[plan.micro_batch] = now
        if embeds and now is not None:
            self._embedded_at = now

    def _charge(self, seconds: float, embedded: bool) -> None:
        """Charge a decode step of `seconds` to the pace, with or without texts embedded beside it."""
        if self._decode_s is None:
            self._ahead_s = seconds if embedded else 0.0  # by turns
        else:
            ahead_s = self._ahead_s + (seconds - self._decode_s if embedded else -self._decode_s)
            self._ahead_s = min(max(ahead_s, 0.0), MOST_AHEAD * self._decode_s)

    def _disturbed(self, plan: StepPlan, since: float, under_way: Iterable[StepPlan]) -> bool:
        """True when prompts of other micro-batches were computed meanwhile."""
        return any(at >= since for micro_batch, at in self._prompted.items() if micro_batch != plan.micro_batch) or any(
            one.prefill and one.micro_batch != plan.micro_batch for one in under_way
        )

    def _halved(self, most: int) -> int:
        return max(most >> self._halvings, min(LEAST, most))


def _streams(sequences: Iterable[Sequence]) -> bool:
    return any(one.decoding and one.samples for one in sequences)


def _learnt(old: float | None, now: float) -> float:
    if not old:
        return now
    return old + (min(now, ODD * old) - old) * LEARN
