"""Thinking budgets on the sampling rank: track tokens, and constrain logits.

Waits for tokens still being computed only if the next constraint depends on them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from tandem.protocol.thinking import Ruling, ThinkingBudget, Thought, begin, follow, free_for, ruling

LIKELY = 2.3
"""Log ratio at which a closing token counts as likely: at least a tenth of the most likely token's probability."""
UNREAD = 4
"""Maximum steps with unread tokens; older ones have surely been computed."""
STATES = 256
"""States kept per sequence, to return to after rejected drafts."""


class _Drawn:
    """Sampled tokens of one step, read once for all rows."""

    def __init__(self, tokens: mx.array) -> None:
        self._tokens = tokens

    @cached_property
    def values(self) -> list[int]:
        return self._tokens.tolist()  # type: ignore[return-value]


@dataclass
class _Tracked:
    budget: ThinkingBudget
    states: list[Thought]
    """States after each of the latest output tokens; initially the state before any."""
    unread: list[tuple[_Drawn, int]] = field(default_factory=list)
    """(Step, row) of each later token that is unread."""

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.states.append(follow(self.budget.tokens, self.states[-1], [token]))
        if len(self.states) > 2 * STATES:
            del self.states[:-STATES]

    def read(self, most: int) -> None:
        """Process sampled tokens, all but the latest `most`."""
        count = max(len(self.unread) - most, 0)
        read, self.unread = self.unread[:count], self.unread[count:]
        self.push([token for step, row in read if (token := step.values[row]) >= 0])

    @property
    def free(self) -> float:
        """Number of tokens that can follow the latest state before a constraint depends on them."""
        return free_for(self.budget, self.states[-1])

    @property
    def waits(self) -> bool:
        """True if the next constraint depends on unread tokens."""
        return len(self.unread) > 0 and self.free <= len(self.unread)


class Budgets:
    """Sequences with a thinking budget, by request id."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Tracked] = {}

    def add(self, request_id: str, budget: ThinkingBudget, output: Sequence[int]) -> None:
        """Add a sequence with output tokens `output`."""
        sequence = self._sequences[request_id] = _Tracked(budget, [begin(budget.tokens)])
        sequence.push(output)

    def remove(self, request_id: str) -> None:
        """Remove a sequence; unknown ids are ignored."""
        self._sequences.pop(request_id, None)

    def place(self, request_id: str, produced: int, tokens: Sequence[int]) -> None:
        """Set a sequence to `produced` output tokens, the last of which is `tokens[0]`; drafts follow it."""
        if (sequence := self._sequences.get(request_id)) is not None:
            sequence.read(0)
            del sequence.states[produced - sequence.states[0].produced :]
            sequence.push(tokens)

    def waits(self, ids: Sequence[str]) -> bool:
        """Return True if constraints of some of `ids` depend on unread tokens."""
        return bool(self._sequences) and any(one.waits for name in ids if (one := self._sequences.get(name)) is not None)

    def rulings(self, ids: Sequence[str], ahead: Sequence[int]) -> list[tuple[int, Ruling]]:
        """Return (row, constraint) for the constrained rows of a batch. `ahead`: number of earlier rows of the same sequence,
        per row."""
        found: list[tuple[int, Ruling]] = []
        if not self._sequences:
            return found
        last = dict(zip(ids, ahead, strict=True))
        for row, (name, i) in enumerate(zip(ids, ahead, strict=True)):
            sequence = self._sequences.get(name)
            if sequence is None:
                continue
            sequence.read(0 if sequence.waits else UNREAD)
            settled = not sequence.unread or sequence.free == math.inf
            if settled and (said := ruling(sequence.budget, sequence.states[i - last[name] - 1])):
                found.append((row, said))
        return found

    def took(self, ids: Sequence[str], ahead: Sequence[int], tokens: mx.array) -> mx.array | None:
        """Track the tokens int32 [n] sampled for `ids`. Return an array to dispatch with them; None if no row has a budget.

        Sequences with several rows are skipped, as the next plan decides which tokens count.
        """
        if not self._sequences:
            return None
        several = {name for name, i in zip(ids, ahead, strict=True) if i}
        rows = [
            (row, one) for row, name in enumerate(ids) if name not in several and (one := self._sequences.get(name)) is not None
        ]
        if not rows:
            return None
        # Copy, as another thread fetches the tokens, and on CUDA two threads must not fetch the same buffer at once.
        copy = tokens + 0
        step = _Drawn(copy)
        for row, sequence in rows:
            sequence.unread.append((step, row))
        return copy


def ruled(logits: mx.array, rulings: Sequence[tuple[int, Ruling]]) -> mx.array:
    """Return logits [n, V] with constraints applied. A forced token that a grammar forbids is not forced."""
    rows = mx.array([row for row, _ in rulings], dtype=mx.int32)
    tokens = mx.array([said.token for _, said in rulings], dtype=mx.int32)[:, None]
    margin = mx.array([LIKELY if said.how == "likely" else mx.inf for _, said in rulings])[:, None]
    bans = mx.array([said.how == "ban" for _, said in rulings])[:, None]
    part = logits[rows]
    own = mx.take_along_axis(part, tokens, axis=-1)
    named = mx.arange(logits.shape[1])[None] == tokens
    taken = mx.isfinite(own) & (own >= part.max(axis=-1, keepdims=True) - margin)
    edited = logits[:]  # a new array object, as assignment would change the caller's
    edited[rows] = mx.where(mx.where(bans, named, taken & ~named), -mx.inf, part)
    return edited
