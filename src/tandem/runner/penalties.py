"""Repetition, frequency and presence penalties, logit bias and the ban on early ends, inside the graph.

Token counts are on the device, since with plans sent ahead the host lacks the last token when it builds the next step. Only
penalised sequences have counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from tandem.protocol.request import SamplingParams


@dataclass(frozen=True)
class PenaltyRows:
    """Penalised rows of one batch, with their parameters."""

    rows: mx.array
    """int32 [r]: their rows in the batch."""
    slots: mx.array
    """int32 [r]: their slots in the history."""
    whole: bool
    """True if every row of the batch is penalised."""
    repetition: mx.array | None
    """float32 [r, 1]; None if all are 1."""
    frequency: mx.array | None
    """float32 [r, 1], or None when all are 0."""
    presence: mx.array | None
    """float32 [r, 1], or None when all are 0."""


class TokenHistory:
    """Tokens of each penalised sequence: presence in its prompt, and counts in its output."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._slots: dict[str, int] = {}
        self._free: list[int] = []
        self._prompt = mx.zeros((0, vocab_size), dtype=mx.bool_)
        self._counts = mx.zeros((0, vocab_size), dtype=mx.float32)

    def add(self, request_id: str, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Add a sequence. Token ids outside the vocabulary are ignored."""
        if not self._free:
            self._grow()
        slot = self._slots[request_id] = self._free.pop()
        counts = np.bincount(self._known(output), minlength=self._vocab_size).astype(np.float32)
        seen = np.zeros(self._vocab_size, dtype=np.bool_)
        seen[self._known(prompt)] = True
        self._prompt[slot], self._counts[slot] = mx.array(seen), mx.array(counts)

    def remove(self, request_id: str) -> None:
        """Remove a sequence, if present. Removing the last one frees the memory."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
        if not self._slots:
            self._free = []
            self._prompt, self._counts = self._prompt[:0], self._counts[:0]

    def rows(self, ids: Sequence[str], params: Sequence[SamplingParams]) -> PenaltyRows | None:
        """Return the penalised rows of a batch; None without any."""
        places = [row for row, request_id in enumerate(ids) if request_id in self._slots]
        if not places:
            return None

        def column(values: list[float], off: float) -> mx.array | None:
            return None if all(value == off for value in values) else mx.array(values, dtype=mx.float32)[:, None]

        asked = [params[row] for row in places]
        return PenaltyRows(
            rows=mx.array(places, dtype=mx.int32),
            slots=mx.array([self._slots[ids[row]] for row in places], dtype=mx.int32),
            whole=len(places) == len(ids),
            repetition=column([one.repetition_penalty for one in asked], 1.0),
            frequency=column([one.frequency_penalty for one in asked], 0.0),
            presence=column([one.presence_penalty for one in asked], 0.0),
        )

    def penalise(self, logits: mx.array, rows: PenaltyRows) -> mx.array:
        """Return penalised logits, float32 [n, V]. Order and formulas as in vLLM: repetition (CTRL), frequency, presence."""
        part = logits if rows.whole else logits[rows.rows]
        counts = self._counts[rows.slots]
        present = counts > 0
        if rows.repetition is not None:
            seen = present | self._prompt[rows.slots]
            part = mx.where(seen, mx.where(part > 0, part / rows.repetition, part * rows.repetition), part)
        if rows.frequency is not None:
            part = part - rows.frequency * counts
        if rows.presence is not None:
            part = mx.where(present, part - rows.presence, part)
        if rows.whole:
            return part
        edited = logits[:]  # a new array object, as assignment would change the caller's
        edited[rows.rows] = part
        return edited

    def count(self, tokens: mx.array, rows: PenaltyRows) -> None:
        """Count the tokens int32 [n] just sampled for the batch, which may still be computed on the device."""
        given = mx.maximum(tokens if rows.whole else tokens[rows.rows], 0)  # negative values mark failed rows
        self._counts = self._counts.at[rows.slots, given].add(1.0)

    def _known(self, tokens: Sequence[int]) -> np.ndarray:
        ids = np.asarray(tokens, dtype=np.int64)
        return ids[(ids >= 0) & (ids < self._vocab_size)]

    def _grow(self) -> None:
        held = self._counts.shape[0]
        more = max(1, held // 2)
        self._prompt = mx.concatenate([self._prompt, mx.zeros((more, self._vocab_size), dtype=mx.bool_)])
        self._counts = mx.concatenate([self._counts, mx.zeros((more, self._vocab_size), dtype=mx.float32)])
        self._free = list(range(held + more - 1, held - 1, -1))


@dataclass(frozen=True)
class TokenEdits:
    """Changes to single logits of a batch: e entries over all rows."""

    rows: mx.array
    """int32 [e]: rows."""
    tokens: mx.array
    """int32 [e]: token ids."""
    values: mx.array
    """float32 [e]: values to add."""

    @staticmethod
    def build(entries: Sequence[tuple[int, int, float]]) -> TokenEdits | None:
        """Build edits from (row, token, value) entries; None without any."""
        if not entries:
            return None
        rows, tokens, values = zip(*entries, strict=True)
        return TokenEdits(mx.array(rows, dtype=mx.int32), mx.array(tokens, dtype=mx.int32), mx.array(values, dtype=mx.float32))

    def added(self, logits: mx.array) -> mx.array:
        """Return logits [n, V] with the values added."""
        return logits.at[self.rows, self.tokens].add(self.values)
