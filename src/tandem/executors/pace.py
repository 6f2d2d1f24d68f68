"""How long steps take: the work in a plan, and the seconds that a unit of it has taken lately. Pure."""

from __future__ import annotations

from tandem.protocol.step import StepPlan

PASS = 16.0
"""A forward pass costs about as much as so many tokens, however few it has: all weights are read."""
CONTEXT = 4096.0
"""Positions of context that cost about as much as one token's products."""
LEARNT = 16
"""Reports after which a pace is known."""
KEEP = 0.999
"""Share of the slowest pace that is left after another report."""
DOWN, UP, RECENT = 0.05, 0.002, 0.2
"""How fast the usual pace follows quicker and slower reports, and how fast the recent one follows all."""


class Workload:
    """Counts the units of work in one gang's plans; one unit is about a token's products."""

    def __init__(self) -> None:
        self._lengths: dict[str, int] = {}
        self._read: dict[str, int] = {}
        """Tokens that a draft model has been shown of each sequence."""

    def count(self, plan: StepPlan) -> float:
        """Units in the next plan, at least 1."""
        lengths = self._lengths
        for request_id in plan.removes:
            lengths.pop(request_id, None)
            self._read.pop(request_id, None)
        for insert in plan.inserts:
            lengths[insert.request_id] = len(insert.tokens)
        work = 1.0
        if plan.decode:
            for request_id in plan.decode:
                lengths[request_id] = lengths.get(request_id, 0) + 1
            if plan.spec_decode_plan is not None:
                lengths.update((row.request_id, row.length + 1) for row in plan.spec_decode_plan.rows)
            work += PASS + len(plan.decode) * plan.width + sum(lengths[one] for one in plan.decode) / CONTEXT
        for op in plan.prefill:
            # The logits of a position, which few need, may cost as much as its way through a stage's layers.
            work += PASS + op.count * (1 + (op.start + op.count / 2) / CONTEXT + (op.prompt_logprobs is not None))
        if plan.spec_decode_plan is not None and plan.spec_decode_plan.ask:
            work += self._guesses(plan, plan.spec_decode_plan.ask)
        return work

    def _guesses(self, plan: StepPlan, ask: int) -> float:
        """Of a draft model, as if it were as large as the model itself: what it has not read, then its guesses."""
        work = 0.0
        for request_id in set(plan.sampled()):
            length = self._lengths.get(request_id, 0)
            work += max(length - self._read.get(request_id, 0), 0) + ask
            self._read[request_id] = length
        return work + PASS * (1 + ask)


class Pace:
    """Seconds for a unit of work: the slowest, the usual and the recent."""

    def __init__(self) -> None:
        self.slowest = 0.0
        """Of late: it is forgotten by and by."""
        self.usual = 0.0
        self.recent = 0.0
        self._reports = 0

    @property
    def known(self) -> bool:
        """False while too little has been seen to judge by."""
        return self._reports >= LEARNT

    @property
    def slowdown(self) -> float:
        """How many times slower than usual it is now; 1 while that is not known."""
        return self.recent / self.usual if self.known and self.usual > 0 else 1.0

    def note(self, seconds: float, work: float) -> None:
        """`work` units took so long."""
        rate = seconds / work
        self._reports += 1
        self.slowest = max(rate, self.slowest * KEEP)
        if self._reports <= LEARNT:
            self.usual = self.recent = self.recent + (rate - self.recent) / self._reports
            return
        self.recent += (rate - self.recent) * RECENT
        self.usual += (rate - self.usual) * (DOWN if rate < self.usual else UP)
