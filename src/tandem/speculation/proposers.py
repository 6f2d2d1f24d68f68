"""Whether a micro-batch speculates in its next step, and with how many drafts: what it gains against what it costs. Pure.

Gains are estimated for each sequence from how its predictions fared, which for n-grams is known whether they were tried
out or not. Costs are what steps of so many rows and positions took lately, given to us as data. A micro-batch speculates only
where that brings more tokens a second than plain decoding, so that it turns itself off and on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.request import EngineRequest
from tandem.protocol.step import SpecDecodeRow, StepPlan, accepted
from tandem.speculation.ngram import NgramIndex

CREDIT = 0.5
"""Share of right predictions that a new sequence is taken to have."""
LEARN = 0.15
"""Weight of the latest prediction in that share, and of the latest step in what steps cost."""
GAIN = 1.05
"""Factor by which drafts must beat the throughput of plain decoding, since starting them costs a pause."""
LEAST = 0.15
"""Acceptance rate below which a sequence gets no drafts, whatever steps cost."""
RETRY, MOST_RETRY = 512, 16384
"""Steps before unused drafting is tried again; the interval doubles with each trial."""
TRY_AGAIN = 64
"""Tokens before the draft model is tried again on a sequence that it failed to predict; grows each time."""
READ = 1024
"""Most prompt tokens indexed in one step's planning."""


@dataclass(frozen=True, kw_only=True)
class SpeculationLimits:
    """How to draft."""

    drafts: int
    """Most drafts of a sequence in one step."""
    shortest: int = 2
    """Fewest tokens that must match before a place to copy from."""
    longest: int = 5
    """Most tokens that are compared there."""
    model: bool = False
    """A draft model guesses, on the rank that samples, and not the index of n-grams."""


@dataclass
class SpeculationCounts:
    """Counts of drafts so far."""

    drafts: int = 0
    """Rows that had drafts, over all steps."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Drafting(Protocol):
    """A sequence that decodes."""

    @property
    def proposer(self) -> Proposer | None:
        """Source of its drafts; None if it gets none."""

    @property
    def room(self) -> int:
        """Most drafts that its next step can use."""

    def drafts(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next."""


class Proposer(Protocol):
    """One sequence's drafts, and how good they are."""

    hits: float
    """Share of predictions that come true."""

    def read(self, tokens: Sequence[int]) -> None:
        """The sequence's tokens so far. A long prompt is read in pieces, before it decodes."""

    def drafts(self, tokens: int, most: int) -> list[int]:
        """Up to `most` tokens that may follow the sequence's `tokens` tokens; none while it has not read them all."""

    def tried(self, drafts: int, accepted: int) -> None:
        """Record how many drafts were tried and accepted."""

    def guessed(self, tokens: int, drafts: list[int]) -> None:
        """A draft model's guesses after the sequence's `tokens` tokens."""


class ModelProposer:
    """Drafts that come with results. How good they are is only known while some are asked for; when it does not pay
    they are asked for again after a while, each time a longer one."""

    def __init__(self) -> None:
        self.hits = CREDIT
        self._drafts: list[int] = []
        self._after = -1
        self._tried_at, self._patience = 0, TRY_AGAIN

    def read(self, tokens: Sequence[int]) -> None:
        """After enough tokens without drafts, there is credit again."""
        if len(tokens) - self._tried_at > self._patience and self.hits < CREDIT:
            self.hits, self._tried_at = CREDIT, len(tokens)
            self._patience = min(2 * self._patience, MOST_RETRY)

    def drafts(self, tokens: int, most: int) -> list[int]:
        """See Proposer."""
        return self._drafts[:most] if self._after == tokens else []

    def tried(self, drafts: int, accepted: int) -> None:
        """Each accepted draft was right, and the next one, if there was any, wrong."""
        for right in [True] * accepted + [False] * (accepted < drafts):
            self.hits += (right - self.hits) * LEARN

    def guessed(self, tokens: int, drafts: list[int]) -> None:
        """See Proposer."""
        self._drafts, self._after, self._tried_at = drafts, tokens, tokens


class NgramProposer:
    """Drafts from the sequence's own past."""

    def __init__(self, limits: SpeculationLimits) -> None:
        self._index = NgramIndex(limits.shortest, limits.longest)
        self.hits = CREDIT

    def read(self, tokens: Sequence[int]) -> None:
        """See Proposer. Each prediction is scored, tried or not."""
        fresh = tokens[len(self._index) : len(self._index) + READ]
        for token in fresh:
            if (prediction := self._index.prediction) is not None:
                self.hits += ((prediction == token) - self.hits) * LEARN
            self._index.extend([token])

    def drafts(self, tokens: int, most: int) -> list[int]:
        """See Proposer."""
        return self._index.drafts(most) if len(self._index) == tokens else []

    def tried(self, drafts: int, accepted: int) -> None:
        """Do nothing: `read` scores predictions."""

    def guessed(self, tokens: int, drafts: list[int]) -> None:
        """Do nothing: there is no draft model."""


@dataclass
class _Cost:
    noted: int
    """Number of the last recorded step."""
    seconds: float | None = None
    """None after the first step, which may have been slow for reasons of its own: kernels are compiled in it."""
    patience: int = RETRY
    """Steps after which it is forgotten, more each time."""


class StepCosts:
    """Seconds that steps took, by rows and width (positions of each row); pipelines' waits for one another included."""

    def __init__(self) -> None:
        self._costs: dict[int, dict[int, _Cost]] = {}
        self._steps = 0

    def note(self, rows: int, width: int, seconds: float) -> None:
        """Record that a step of `rows` rows with `width` positions each took `seconds`."""
        self._steps += 1
        costs = self._costs.setdefault(rows, {})
        old = costs.get(width)
        if old is None:
            costs[width] = _Cost(self._steps)
            return
        if self._forgotten(old):
            old.seconds, old.patience = None, min(2 * old.patience, MOST_RETRY)
        old.seconds = seconds if old.seconds is None else old.seconds + (seconds - old.seconds) * LEARN
        old.noted = self._steps

    def ratio(self, rows: int, width: int) -> float | None:
        """Cost of such a step, as a multiple of one with a position a row; None while that is not known.

        A width that was not tried lately is taken to cost what the next narrower one does.
        """
        costs = self._costs.get(rows, {})
        plain = costs[1].seconds if 1 in costs else None
        if not plain:
            return None
        known = (
            (other, cost.seconds / plain)
            for other, cost in costs.items()
            if 1 < other <= width and cost.seconds and not self._forgotten(cost)
        )
        return max(known, default=(1, 1.0))[1]

    def _forgotten(self, cost: _Cost) -> bool:
        return self._steps - cost.noted > cost.patience


def best_drafts(rows: Sequence[tuple[Sequence[int], float]], costs: StepCosts) -> list[list[int]] | None:
    """The drafts to try of each row's (possible drafts, share of right predictions): all of them, half of them and so
    on; None if plain decoding promises more, or its cost is not known yet."""
    rows = [(drafts if hits >= LEAST else (), hits) for drafts, hits in rows]
    best, promise = 0, GAIN
    most = max((len(drafts) for drafts, _ in rows), default=0)
    while most:
        cost = costs.ratio(len(rows), most + 1)
        if cost is None:
            return None
        tokens = sum(_expected(min(len(drafts), most), hits) for drafts, hits in rows)
        if (gain := tokens / len(rows) / cost) > promise:
            best, promise = most, gain
        most //= 2
    return [list(drafts[:best]) for drafts, _ in rows] if best else None


def _expected(drafts: int, hits: float) -> float:
    """Expected tokens of a row with `drafts` drafts, each right with probability `hits`."""
    return sum(hits**i for i in range(drafts + 1))


class Speculation:
    """Speculative decoding of one scheduler; without limits there is none."""

    def __init__(self, limits: SpeculationLimits | None) -> None:
        self._limits = limits
        self._costs = StepCosts()
        self.counts = SpeculationCounts()

    @property
    def most(self) -> int:
        """Most drafts of a sequence in one step."""
        return self._limits.drafts if self._limits else 0

    @property
    def model(self) -> bool:
        """A draft model guesses."""
        return self._limits is not None and self._limits.model

    def proposer(self, request: EngineRequest) -> Proposer | None:
        """For a new sequence. With penalties or a grammar a token depends on all before it: none is drafted."""
        params = request.params
        if self._limits is None or request.pooling or params.penalised or params.structured_outputs is not None:
            return None
        return ModelProposer() if self._limits.model else NgramProposer(self._limits)

    def drafts(self, sequences: Sequence[Drafting], most: int) -> list[list[int]] | None:
        """Return up to `most` drafts worth trying for each of `sequences`, which decode together; None for no drafts."""
        if self._limits is None:
            return None
        rows = [(one.drafts(most), one.proposer.hits if one.proposer else 0.0) for one in sequences]
        if not any(drafts for drafts, _ in rows):
            return None
        # A draft model's are paid for already.
        return [drafts for drafts, _ in rows] if self._limits.model else best_drafts(rows, self._costs)

    def ask(self, sequences: Sequence[Drafting], most: int) -> int:
        """How many tokens, up to `most`, the draft model shall guess for these, which decode together, for their next
        step."""
        if self._limits is None or not self._limits.model:
            return 0
        rows = [([0] * min(most, one.room), one.proposer.hits if one.proposer else 0.0) for one in sequences]
        best = best_drafts(rows, self._costs) if any(drafts for drafts, _ in rows) else None
        return max(map(len, best)) if best else 0

    def took(self, plan: StepPlan, seconds: float | None, *, ahead: bool) -> None:
        """Record that a result came `seconds` after the one before it in its micro-batch; None where that is not known.

        Plain steps count when they were sent `ahead` of the result of the one before: drafts cannot be, and have to
        beat that.
        """
        if self._limits is None or seconds is None or not plan.decode or plan.prefill:
            return
        drafts = plan.spec_decode_plan is not None and plan.spec_decode_plan.drafts > 0
        if ahead or drafts:
            self._costs.note(len(plan.decode), plan.width, seconds)

    def accept(self, sequence: Drafting, row: SpecDecodeRow, sampled: Sequence[int]) -> list[int]:
        """The row's output, of the tokens that were sampled after each of its own."""
        count = accepted(row.tokens, sampled)
        if len(row.tokens) > 1:
            self.counts.drafts += 1
            self.counts.draft_tokens += len(row.tokens) - 1
            self.counts.accepted_tokens += count
            if sequence.proposer is not None:
                sequence.proposer.tried(len(row.tokens) - 1, count)
        output = list(sampled[: count + 1])
        # What went wrong behind a draft is found again, and told, by the next step.
        return output[:-1] if count and output[-1] < 0 else output

    def forget(self) -> None:
        """The ranks, or their layout, are others from now on."""
        self._costs = StepCosts()
