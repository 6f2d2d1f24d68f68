"""Prefill chunk size of steps in which other sequences decode: limited by time, not by tokens alone. Pure.

Measured step times are passed in. A chunk is the largest size halved as often as the time limit needs, so ranks see few
shapes. Plans contain it, so it is equal on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from tandem.protocol.step import StepPlan
from tandem.scheduler.sequence import Sequence

STEPS = 10.0
"""Default time limit of a chunk, in decode steps."""
LEAST = 32
"""Minimum chunk size in tokens: a pass reads all weights however few tokens it has."""
SLACK = 1.25
"""Excess over the time limit before a chunk is halved. It is doubled when the doubled chunk keeps the limit."""
MOST_AHEAD = 20.0
"""Maximum pause of embedding prompts, in decode steps."""
LEARN = 0.2
"""Weight of the latest step in the moving averages."""
UNIT = 16
"""Chunks of equal time are a multiple of these tokens."""
SAME_S = 1e-6
"""Difference of times that is due to rounding."""
ODD = 4.0
"""Cap of an outlier, as a multiple of the average: more is due to other causes."""


class PromptPace:
    """Recent costs of decode steps and prompt tokens, and the chunk size that follows from them."""

    def __init__(self, limit_s: float | None = None) -> None:
        """Set the time limit of a chunk in seconds. None: `STEPS` decode steps; 0: no limit."""
        self._limit_s = limit_s
        self._halvings = 0
        self._decode_s: float | None = None
        self._token_s: float | None = None
        self._alone: tuple[int, float] | None = None
        """(Tokens, seconds) of the largest prompt chunk computed without decoding."""
        self._prompted: dict[int, float] = {}
        """Time of the last result of a step with prompts, by micro-batch."""
        self._embedded_at = -math.inf
        """Time of the last result of a step with embedding prompts."""
        self._ahead_s = 0.0
        """Seconds of embedding beside decoding streams, minus seconds of decoding since."""

    def chunk(self, most: int, beside: Iterable[Sequence], plans: int = 1, doubling: int = 0) -> int:
        """Return the prompt tokens allowed in the next step, given the running sequences `beside`. `most` if costs are
        unknown or none of them decodes. `plans`: steps with prompts that a sequence waits for between two tokens.
        `doubling`: as in `Limits`; chunks of one prompt take the same time, while those of several fill the stages."""
        members, limit_s, token_s = [*beside], self.limit_s, self.token_s
        if limit_s is not None and token_s is not None and _streams(members):
            limit_s /= plans
            while token_s * self._halved(most) > limit_s * SLACK and self._halved(most) > LEAST:
                self._halvings += 1
            while self._halvings and token_s * (most >> (self._halvings - 1)) <= limit_s:
                self._halvings -= 1
            most = self._halved(most)
        prompts = [one for one in members if not one.decoding] if doubling else []
        return even_chunk(most, prompts[0].computed, prompts[0].target, doubling) if len(prompts) == 1 else most

    def embeds(self, beside: Iterable[Sequence]) -> bool:
        """Return True if the next step may contain embedding prompts. Beside decoding streams they get at most half of the
        time."""
        return self._ahead_s <= 0.0 or not _streams(beside)

    @property
    def token_s(self) -> float | None:
        """Seconds that a prompt token adds to a step; None while unknown."""
        if self._token_s is not None or self._alone is None:
            return self._token_s
        tokens, seconds = self._alone
        return max(seconds - (self._decode_s or 0.0), 0.0) / tokens

    @property
    def limit_s(self) -> float | None:
        """Time limit of a chunk in seconds; None without a limit, or while unknown."""
        if self._limit_s is None:
            return None if self._decode_s is None else STEPS * self._decode_s
        return self._limit_s or None

    def took(
        self,
        plan: StepPlan,
        now: float | None,
        seconds: float | None,
        busy_s: float,
        under_way: Collection[StepPlan],
        *,
        staged: bool = False,
    ) -> None:
        """Record a plan's result.

        `now`: time of the result in seconds. `seconds`: time since the micro-batch's previous result; None if it had none
        directly before. `busy_s`: compute seconds of the slowest rank. `under_way`: other plans in progress. `staged`: chunks
        of several steps are computed at once, by several stages, so that a prompt token costs the time of the slowest.
        """
        tokens = sum(op.count for op in plan.prefill)
        embeds = _embeds(plan)
        if staged and tokens >= LEAST and busy_s > 0 and not (plan.decode and self._token_s):
            self._token_s = _learnt(self._token_s, busy_s / tokens)
        if plan.decode and now is not None and seconds is not None:
            self._charge(seconds, embeds or self._embedded_at >= now - seconds or any(map(_embeds, under_way)))
            if tokens >= LEAST and not staged:
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
        """Update the balance between embedding and decoding after a decode step of `seconds`. `embedded`: embeddings ran
        beside it."""
        if self._decode_s is None:
            self._ahead_s = seconds if embedded else 0.0  # alternate while the cost of decoding is unknown
        else:
            ahead_s = self._ahead_s + (seconds - self._decode_s if embedded else -self._decode_s)
            self._ahead_s = min(max(ahead_s, 0.0), MOST_AHEAD * self._decode_s)

    def _disturbed(self, plan: StepPlan, since: float, under_way: Iterable[StepPlan]) -> bool:
        """Return True if prompts of other micro-batches were computed meanwhile."""
        own = self._prompted.get(plan.micro_batch, -math.inf) > since + SAME_S  # later than the previous step of its own
        others = any(at >= since for micro_batch, at in self._prompted.items() if micro_batch != plan.micro_batch)
        return own or others or any(one.prefill and one.micro_batch != plan.micro_batch for one in under_way)

    def _halved(self, most: int) -> int:
        return max(most >> self._halvings, min(LEAST, most))


def even_chunk(most: int, start: int, target: int, doubling: int) -> int:
    """Return the tokens of a prompt's chunk at `start`, at most `most`, such that its `target` tokens take `target / most`
    chunks of equal time. A token at position `doubling` takes twice as long as the first."""
    begin = doubling + start
    tokens = math.sqrt(begin**2 + most * (2 * doubling + target)) - begin  # a chunk's time is the area below begin .. end
    return min(most, max(-(-int(tokens) // UNIT) * UNIT, LEAST))


def _streams(sequences: Iterable[Sequence]) -> bool:
    return any(one.decoding and one.samples for one in sequences)


def _embeds(plan: StepPlan) -> bool:
    return any(op.pooling is not None for op in plan.prefill)


def _learnt(old: float | None, now: float) -> float:
    if not old:
        return now
    return old + (min(now, ODD * old) - old) * LEARN
