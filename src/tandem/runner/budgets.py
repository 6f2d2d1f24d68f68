"""Budgets of thinking on the rank that samples: they follow the tokens, and keep logits to what is allowed.

Tokens under way on the device are waited for only where a budget may say something of the next one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import mlx.core as mx

from tandem.protocol.thinking import Ruling, ThinkingBudget, Thought, begin, follow, free_for, ruling

LIKELY = 2.3
"""A closing token is likely whose probability is at least a tenth of the most likely token's: the logarithm of ten."""
UNREAD = 4
"""Steps whose tokens may be unread: those before have surely been computed."""
STATES = 256
"""Latest states of a sequence that are kept; drafts that were not accepted go back to one of them."""


class _Drawn:
    """Tokens of one step, read once for all rows."""

    def __init__(self, tokens: mx.array) -> None:
        self._tokens = tokens

    @cached_property
    def values(self) -> list[int]:
        return self._tokens.tolist()  # type: ignore[return-value]


@dataclass
class _Tracked:
    budget: ThinkingBudget
    states: list[Thought]
    """After each of the latest output tokens; at first the one before any."""
    unread: list[tuple[_Drawn, int]] = field(default_factory=list)
    """Steps and rows of the tokens after these."""

    def push(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.states.append(follow(self.budget.tokens, self.states[-1], [token]))
        if len(self.states) > 2 * STATES:
            del self.states[:-STATES]

    def read(self, most: int) -> None:
        """Follow drawn tokens, all but the latest `most`."""
        count = max(len(self.unread) - most, 0)
        read, self.unread = self.unread[:count], self.unread[count:]
        self.push([token for step, row in read if (token := step.values[row]) >= 0])

    @property
    def free(self) -> float:
        """Tokens, read or not, after the latest state before there is a ruling that depends on them."""
        return free_for(self.budget, self.states[-1])

    @property
    def waits(self) -> bool:
        """True if the next ruling depends on tokens that are not read."""
        return len(self.unread) > 0 and self.free <= len(self.unread)


class Budgets:
    """The sequences that have a budget, by request id."""

    def __init__(self) -> None:
        self._sequences: dict[str, _Tracked] = {}

    def add(self, request_id: str, budget: ThinkingBudget, output: Sequence[int]) -> None:
        """Begin a sequence that has produced these tokens."""
        sequence = self._sequences[request_id] = _Tracked(budget, [begin(budget.tokens)])
        sequence.push(output)

    def remove(self, request_id: str) -> None:
        """Forget a sequence, if it is one of these."""
        self._sequences.pop(request_id, None)

    def place(self, request_id: str, produced: int, tokens: Sequence[int]) -> None:
        """The sequence has `produced` output tokens, the last of which is `tokens[0]`; drafts follow it."""
        if (sequence := self._sequences.get(request_id)) is not None:
            sequence.read(0)
            del sequence.states[produced - sequence.states[0].produced :]
            sequence.push(tokens)

    def waits(self, ids: Sequence[str]) -> bool:
        """Whether the rulings of one of `ids` depend on tokens that are still to be read."""
        return any(one.waits for name in ids if (one := self._sequences.get(name)) is not None)

    def rulings(self, ids: Sequence[str], ahead: Sequence[int]) -> list[tuple[int, Ruling]]:
        """Rows of a batch, and what is said of their next tokens. `ahead`: rows before of the same sequence."""
        found = []
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
        """Follow the tokens int32 [n] that were drawn for `ids`. Returns an array to dispatch with them, if any.

        Of several rows of a sequence the next plan says which count.
        """
        several = {name for name, i in zip(ids, ahead, strict=True) if i}
        rows = [
            (row, one) for row, name in enumerate(ids) if name not in several and (one := self._sequences.get(name)) is not None
        ]
        if not rows:
            return None
        # A copy: another thread fetches the tokens, and on CUDA two must not fetch the same buffer at once.
        copy = tokens + 0
        step = _Drawn(copy)
        for row, sequence in rows:
            sequence.unread.append((step, row))
        return copy


def ruled(logits: mx.array, rulings: Sequence[tuple[int, Ruling]]) -> mx.array:
    """Logits [n, V] in which rows hold what their rulings allow. A forced token that a grammar forbids is not forced."""
    rows = mx.array([row for row, _ in rulings], dtype=mx.int32)
    tokens = mx.array([said.token for _, said in rulings], dtype=mx.int32)[:, None]
    margin = mx.array([LIKELY if said.how == "likely" else mx.inf for _, said in rulings])[:, None]
    bans = mx.array([said.how == "ban" for _, said in rulings])[:, None]
    part = logits[rows]
    own = mx.take_along_axis(part, tokens, axis=-1)
    named = mx.arange(logits.shape[1])[None] == tokens
    taken = mx.isfinite(own) & (own >= part.max(axis=-1, keepdims=True) - margin)
    edited = logits[:]  # an object of its own: assignment would change the caller's
    edited[rows] = mx.where(mx.where(bans, named, taken & ~named), -mx.inf, part)
    return edited
