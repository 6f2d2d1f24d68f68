"""Speculative decoding decisions: whether a micro-batch uses drafts in its next step, and how many. Pure.

Gains are estimated for each sequence from the accuracy of its predictions; n-gram predictions are scored even when not tried.
Costs are recent step times by rows and positions, passed in as data. Drafts are used only where they increase tokens per
second over plain decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from tandem.protocol.request import EngineRequest
from tandem.protocol.step import SpecDecodeRow, StepPlan, accepted
from tandem.speculation.ngram import NgramIndex

CREDIT = 0.5
"""Assumed accuracy of a new sequence's predictions."""
LEARN = 0.15
"""Weight of the latest sample in the moving averages of accuracy and step cost."""
GAIN = 1.05
"""Minimum speedup over plain decoding to use drafts, since starting them costs a pause."""
STEADY = 0.03
"""Weight of the latest prediction in the accuracy of a draft model over all sequences."""
ODD = 2.0
"""Maximum weight of one step in the average cost, in averages."""
KNOWN = 3
"""Steps after which their cost is known."""
LEAST = 0.15
"""Accuracy below which a sequence gets no drafts, whatever the step costs."""
RETRY, MOST_RETRY = 512, 16384
"""Steps before unused drafting is tried again; the interval doubles each time, up to the second value."""
FIRST, TRIALS = 4, 3
"""How many predictions of a draft model are requested one at a time: the first of all sequences, and in a retry, which ends
with its first correct one, those that may be wrong."""
TRY_AGAIN = 64
"""Tokens without drafts, of all sequences, before a draft model that failed is retried; doubles each time it fails again."""
READ = 1024
"""Maximum prompt tokens indexed per step."""


@dataclass(frozen=True, kw_only=True)
class SpeculationLimits:
    """Limits of speculative decoding."""

    drafts: int
    """Maximum drafts per sequence and step."""
    shortest: int = 2
    """Minimum n-gram length of a match."""
    longest: int = 5
    """Maximum n-gram length compared."""
    model: bool = False
    """True to draft with a draft model on the sampling rank instead of the n-gram index."""
    forced: bool = False
    """True to try as many drafts as allowed in each step, though they be wrong, as a warm-up does."""


@dataclass
class SpeculationCounts:
    """Totals of drafts since the start."""

    drafts: int = 0
    """Number of rows with drafts, over all steps."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


class Drafting(Protocol):
    """Decoding sequence, as speculation needs it."""

    @property
    def proposer(self) -> Proposer | None:
        """Source of its drafts; None without drafts."""

    @property
    def room(self) -> int:
        """Maximum useful drafts in its next step."""

    def drafts(self, most: int) -> list[int]:
        """Return up to `most` draft tokens."""


class ModelAccuracy:
    """Accuracy of a draft model over all sequences, and how often it is tried where it fails."""

    def __init__(self) -> None:
        self.hits = CREDIT
        """Average of the fraction of correct predictions, over about `1 / STEADY` of them."""
        self.untried = 0
        """Tokens of sequences without drafts since the last retry."""
        self.patience = TRY_AGAIN
        """Value of `untried` at which the next retry is due; doubles each time one fails."""
        self.wrong = 0
        """Wrong predictions of retries since `patience` changed, of all sequences, as one may end during a retry."""
        self.count = 0
        """Recorded predictions."""

    def note(self, right: bool) -> None:
        """Record a prediction."""
        self.count += 1
        self.hits += (right - self.hits) * max(1 / (self.count + 1), STEADY)


class ModelProposer:
    """Proposer for a draft model, whose drafts come with step results.

    Accuracy is known only while drafts are tried. If they do not pay off, they are retried after growing intervals. A retry
    ends with its first correct prediction, or after `TRIALS` wrong ones.
    """

    def __init__(self, shared: ModelAccuracy) -> None:
        """Start from the accuracy that the draft model has over all sequences."""
        self._shared, self._own = shared, shared.hits
        self._drafts: list[int] = []
        self._after = self._read = -1
        self._before, self._trials = 0.0, 0
        """Own accuracy before a retry, and predictions that it may still get wrong; 0 outside of one."""

    @property
    def hits(self) -> float:
        """Expected fraction of correct predictions: half-way to that over all, as few of its own are a matter of luck."""
        return (self._own + self._shared.hits) / 2

    @property
    def trial(self) -> bool:
        """True if one draft at a time is worth requesting, to learn whether predictions are correct: for the first ones of all
        sequences, and in a retry."""
        return self._trials > 0 or self._shared.count < FIRST

    def read(self, tokens: Sequence[int]) -> None:
        """Count the tokens without drafts, and retry after enough of them."""
        shared = self._shared
        if self._read < 0:
            self._own = shared.hits  # that at its start, not of when it was submitted
        elif self._after < self._read:
            shared.untried += len(tokens) - self._read
        self._read = len(tokens)
        if shared.untried > shared.patience and not self._trials:
            shared.untried = 0
            if self.hits < CREDIT:
                self._before, self._own, self._trials = self._own, 2 * CREDIT, TRIALS
            else:
                self._own = max(self._own, shared.hits)  # its few mistakes are no reason to stop, nor to wait longer next time

    def drafts(self, tokens: int, most: int) -> list[int]:
        """Return up to `most` drafts after the sequence's `tokens` tokens; empty until it has read them all."""
        return self._drafts[:most] if self._after == tokens else []

    def tried(self, drafts: int, accepted: int) -> None:
        """Record how many drafts were tried and accepted: those were right, the next one, if any, wrong."""
        shared = self._shared
        if self._trials:
            shared.untried, self._trials = 0, 0 if accepted else self._trials - 1
            shared.wrong = 0 if accepted else shared.wrong + 1
            if accepted:
                self._own, shared.patience = CREDIT, TRY_AGAIN
            elif not self._trials:
                self._own = self._before
            if shared.wrong >= TRIALS:
                shared.wrong, shared.patience = 0, min(2 * shared.patience, MOST_RETRY)
        for right in [True] * accepted + [False] * (accepted < drafts):
            if not self._trials:
                self._own += (right - self._own) * LEARN
            shared.note(right)

    def guessed(self, tokens: int, drafts: list[int]) -> None:
        """Store the draft model's `drafts` after the sequence's `tokens` tokens."""
        self._drafts, self._after = drafts, tokens


class NgramProposer:
    """Proposer for n-gram matches in the sequence itself."""

    trial = False

    def __init__(self, limits: SpeculationLimits) -> None:
        self._index = NgramIndex(limits.shortest, limits.longest)
        self.hits = CREDIT

    def read(self, tokens: Sequence[int]) -> None:
        """Read new tokens, and score each prediction, tried or not. Long prompts are read in parts, before decoding."""
        fresh = tokens[len(self._index) : len(self._index) + READ]
        for token in fresh:
            if (prediction := self._index.prediction) is not None:
                self.hits += ((prediction == token) - self.hits) * LEARN
            self._index.extend([token])

    def drafts(self, tokens: int, most: int) -> list[int]:
        """Return up to `most` drafts after the sequence's `tokens` tokens; empty until it has read them all."""
        return self._index.drafts(most) if len(self._index) == tokens else []

    def tried(self, drafts: int, accepted: int) -> None:
        """Do nothing: `read` scores predictions."""

    def guessed(self, tokens: int, drafts: list[int]) -> None:
        """Do nothing: there is no draft model."""


Proposer = ModelProposer | NgramProposer
"""Source of one sequence's drafts, with their accuracy."""


@dataclass
class _Cost:
    noted: int = 0
    """Index of the last recorded step."""
    seconds: float = math.inf
    """Average cost."""
    count: int = 0
    """Recorded steps. The first may have compiled kernels, and of the next two the shorter one counts."""
    patience: int = RETRY
    """Steps after which the cost is forgotten; doubles each time."""

    @property
    def known(self) -> float | None:
        """Average cost; None before three steps, since one alone may have waited for another program."""
        return self.seconds if self.count >= KNOWN else None

    def note(self, seconds: float) -> None:
        """Record a step; one that took far longer than most counts as `ODD` times the average."""
        self.count += 1
        if self.count > KNOWN:
            self.seconds += (min(seconds, ODD * self.seconds) - self.seconds) * LEARN
        elif self.count > 1:
            self.seconds = min(self.seconds, seconds)


class StepCosts:
    """Recent step times by rows and width (positions per row), including waits between pipeline stages."""

    def __init__(self) -> None:
        self._costs: dict[int, dict[int, _Cost]] = {}
        self._steps = 0

    def note(self, rows: int, width: int, seconds: float) -> None:
        """Record that a step of `rows` rows with `width` positions each took `seconds`."""
        self._steps += 1
        costs = self._costs.setdefault(rows, {})
        cost = costs.setdefault(width, _Cost(self._steps))
        if self._forgotten(cost):
            cost = costs[width] = _Cost(count=1, patience=min(2 * cost.patience, MOST_RETRY))
        cost.note(seconds)
        cost.noted = self._steps

    def excess(self, rows: int, seconds: float) -> float:
        """Return by how much `seconds` exceed a step of `rows` rows and width 1; 0 while that is unknown."""
        plain = self._costs.get(rows, {}).get(1, _Cost()).known
        return max(seconds - plain, 0.0) if plain else 0.0

    def ratio(self, rows: int, width: int) -> float | None:
        """Return the step cost relative to a step of width 1 with as many rows; None while unknown.

        A width not tried recently is assumed to cost as much as the next narrower one.
        """
        costs = self._costs.get(rows, {})
        plain = costs.get(1, _Cost()).known
        if not plain:
            return None
        known = (
            (other, cost.known / plain)
            for other, cost in costs.items()
            if 1 < other <= width and cost.known and not self._forgotten(cost)
        )
        return max(known, default=(1, 1.0))[1]

    def _forgotten(self, cost: _Cost) -> bool:
        return self._steps - cost.noted > cost.patience


def best_drafts(rows: Sequence[tuple[Sequence[int], float]], costs: StepCosts) -> list[list[int]] | None:
    """Return the drafts to try for each row of (possible drafts, accuracy): all, half of them and so on. None if plain
    decoding is expected to be faster, or its cost is unknown."""
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
    """Return the expected tokens of a row with `drafts` drafts, each right with probability `hits`."""
    return sum(hits**i for i in range(drafts + 1))


class Speculation:
    """Speculative decoding of one scheduler; disabled without limits."""

    def __init__(self, limits: SpeculationLimits | None) -> None:
        self._limits = limits
        self._costs, self._accuracy = StepCosts(), ModelAccuracy()
        self._tried: dict[int, tuple[int, int, float]] = {}
        """By micro-batch: rows, width and seconds of the last step, if it had drafts."""
        self.counts = SpeculationCounts()

    @property
    def most(self) -> int:
        """Maximum drafts per sequence and step."""
        return self._limits.drafts if self._limits else 0

    @property
    def model(self) -> bool:
        """True if a draft model makes the drafts."""
        return self._limits is not None and self._limits.model

    def proposer(self, request: EngineRequest) -> Proposer | None:
        """Return the proposer of a new sequence, or None. With penalties or a grammar a token depends on all before it, so
        there are no drafts."""
        params = request.params
        if self._limits is None or request.pooling or params.penalised or params.structured_outputs is not None:
            return None
        return ModelProposer(self._accuracy) if self._limits.model else NgramProposer(self._limits)

    def drafts(self, sequences: Sequence[Drafting], most: int) -> list[list[int]] | None:
        """Return up to `most` drafts worth trying for each of `sequences`, which decode together; None for no drafts."""
        if self._limits is None:
            return None
        if self._limits.forced:
            return [[0] * min(most, one.room) for one in sequences]
        rows = [(one.drafts(most), one.proposer.hits if one.proposer else 0.0) for one in sequences]
        if not any(drafts for drafts, _ in rows):
            return None
        # The draft model's cost is already spent.
        return [drafts for drafts, _ in rows] if self._limits.model else best_drafts(rows, self._costs)

    def ask(self, sequences: Sequence[Drafting], most: int) -> int:
        """Return the number of tokens, up to `most`, to request from the draft model for these sequences' next step."""
        if self._limits is None or not self._limits.model:
            return 0
        if self._limits.forced:
            return max((min(most, one.room) for one in sequences), default=0)
        trials = [one.proposer is not None and one.proposer.trial for one in sequences]
        rows = [([0] * min(most, one.room), one.proposer.hits if one.proposer else 0.0) for one in sequences]
        best = best_drafts(rows, self._costs) if any(drafts for drafts, _ in rows) else None
        return max(min(len(row), 1 if trial else most) for row, trial in zip(best, trials, strict=True)) if best else 0

    def took(self, plan: StepPlan, seconds: float | None, *, ahead: bool) -> None:
        """Record a result `seconds` after the previous one of its micro-batch; None if unknown.

        Plain steps count only if sent `ahead` of the previous result. Drafts must beat those, as they cannot be sent ahead.
        What the step after drafts takes beyond a plain one counts as theirs: it also takes back what was rejected.
        """
        tried, rows = self._tried.pop(plan.micro_batch, None), len(plan.decode)
        drafts = plan.spec_decode_plan is not None and plan.spec_decode_plan.drafts > 0
        measured = seconds if rows and not plan.prefill else None
        if tried is not None:
            after = 0.0 if drafts or measured is None else self._costs.excess(rows, measured)
            self._costs.note(tried[0], tried[1], tried[2] + after)
        if self._limits is None or measured is None:
            return
        if drafts:
            self._tried[plan.micro_batch] = rows, plan.width, measured
        elif ahead:
            self._costs.note(rows, plan.width, measured)

    def accept(self, sequence: Drafting, row: SpecDecodeRow, sampled: Sequence[int]) -> list[int]:
        """Return the output of a row from the tokens sampled after each of its positions; update acceptance counts."""
        count = accepted(row.tokens, sampled)
        if len(row.tokens) > 1:
            self.counts.drafts += 1
            self.counts.draft_tokens += len(row.tokens) - 1
            self.counts.accepted_tokens += count
            if sequence.proposer is not None:
                sequence.proposer.tried(len(row.tokens) - 1, count)
        output = list(sampled[: count + 1])
        # An error after a draft recurs in the next step, which reports it.
        return output[:-1] if count and output[-1] < 0 else output

    def forget(self) -> None:
        """Reset the step costs, as ranks or layout have changed."""
        self._costs, self._tried = StepCosts(), {}
