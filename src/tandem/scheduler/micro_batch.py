"""Micro-batch: one of the independent batches that keep all pipeline stages busy."""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from tandem.kv.budget import rounded
from tandem.protocol.step import KVShape, PrefillOp, StepPlan
from tandem.scheduler.sequence import Sequence

PATIENCE = 4
"""Consecutive steps that compute the shortest prompts first, before an overdue one is computed."""
SLACK = 3
"""Allowed imbalance: one extra row over the emptiest micro-batch per this many running sequences. Beyond it a micro-batch
takes no sequence, as stages would idle."""
ALIKE = 256
"""KV positions by which two costs may differ and still count as equal."""


@dataclass(eq=False)
class MicroBatch:
    """Members in the order of insertion on the ranks, and pending removals."""

    index: int
    step: int = 1
    """Positions by which its rows grow at least."""
    shape: KVShape = KVShape()
    """Capacity of its KV buffer once all plans sent so far are done."""
    members: dict[str, Sequence] = field(default_factory=dict)
    removes: list[str] = field(default_factory=list)
    outstanding: int = 0
    """Number of plans sent without a result."""
    sampling: int = 0
    """Number of these plans that sample tokens."""
    _ahead: set[int] = field(default_factory=set)
    """Ids of outstanding plans that were sent before the previous result came back."""
    _shortest_first: int = 0
    """Consecutive steps with the shortest prompts first."""
    last_step: int = -1
    names_tokens: bool = False
    """True if the ranks lack the last tokens of its sequences. The next plan contains them, so it waits for results."""
    result_at: float | None = None
    """Time of the last result, if the micro-batch was still decoding; else None."""

    def drop(self, sequence: Sequence) -> None:
        """Remove a member from the batch; the next plan informs the ranks."""
        del self.members[sequence.request_id]
        self.removes.append(sequence.request_id)
        sequence.leave()

    def sent(self, plan: StepPlan) -> None:
        """Record that `plan` is sent."""
        if self.sampling:
            self._ahead.add(plan.step_id)
        if not plan.pause:
            self.names_tokens = not plan.hands_out
        self.outstanding += 1
        self.sampling += bool(plan.sampled())
        self.last_step = plan.step_id

    def returned(self, plan: StepPlan) -> bool:
        """Record the result of `plan`. Return True if it was sent before the previous plan's result."""
        self.outstanding -= 1
        self.sampling -= bool(plan.sampled())
        ahead = plan.step_id in self._ahead
        self._ahead.discard(plan.step_id)
        return ahead

    def took(self, now: float | None) -> float | None:
        """Return the seconds since the previous result, for a result at `now`. None if the micro-batch did not decode in
        between."""
        decodes = any(sequence.decoding for sequence in self.members.values())
        since, self.result_at = self.result_at, now if decodes else None
        return None if now is None or since is None else now - since

    def decoding(self) -> list[Sequence]:
        """Return the members whose prompt is computed, in joining order."""
        return [sequence for sequence in self.members.values() if sequence.computed >= sequence.target]

    @property
    def prompts(self) -> bool:
        """True if some members' prompts are not computed yet."""
        return any(not sequence.decoding for sequence in self.members.values())

    def positions(self, extra: Iterable[int] = (), drafts: int = 0) -> int:
        """Return the KV positions needed after the next step, with up to `drafts` drafts per row and rows of `extra` lengths
        added."""
        members, more = self.members.values(), list(extra)
        longest = max(longest_row(members, 1 + drafts), *more, 0)
        return (len(members) + len(more)) * rounded(longest, self.step)

    def occupied(self, needed: int) -> int:
        """Return the KV positions taken until its prompts have joined: those `needed` by the next step, or its buffer plus
        prompts if more."""
        prompts = sum([s.target for s in self.members.values() if s.computed < s.target])
        return max(needed, self.shape.size + prompts)

    def split(self, joins: Container[str]) -> tuple[list[Sequence], list[Sequence]]:
        """Return the members that are rows of its KV buffer, those in `joins` too, and the other members."""
        rows = [s for s in self.members.values() if s.samples and (s.computed >= s.target or s.request_id in joins)]
        if len(rows) == len(self.members):
            return rows, []
        joined = set(rows)
        return rows, [one for one in self.members.values() if one not in joined]

    def prefill(self, budget: int, *, embeds: bool = True) -> list[PrefillOp]:
        """Return prompt chunks of up to `budget` tokens in all, the shortest remaining prompt first, overdue ones before.
        Embedding prompts only if `embeds`; none is divided that a later step can compute whole, in a pass that it shares. A
        prompt's last chunk waits for its grammar."""
        waiting = [
            s for s in self.members.values() if s.computed < s.target and s.computable and (embeds or not s.request.pooling)
        ]
        overdue = next((s for s in waiting if min(s.skipped, self._shortest_first) >= PATIENCE and not s.awaits_grammar), None)
        self._shortest_first = 0 if overdue else self._shortest_first + 1
        waiting.sort(key=lambda s: 0 if s is overdue else s.target - s.computed)
        chunks: list[PrefillOp] = []
        most = budget
        for sequence in waiting:
            count = sequence.chunk(budget)
            last = sequence.computed + count == sequence.target
            divided = bool(chunks and sequence.request.pooling) and not sequence.computed and count < sequence.target <= most
            if count <= 0 or divided or (last and sequence.awaits_grammar):
                sequence.skipped += 1
                continue
            budget -= count
            chunks.append(sequence.prefill(count))
            sequence.skipped = 0
        return chunks


def longest_row(rows: Collection[Sequence], more: int) -> int:
    """Return the longest of `rows`, each `more` positions longer than computed, with its whole prompt; 0 without rows."""
    if not rows:
        return 0
    return max([max([one.computed for one in rows]) + more, *[one.target for one in rows if one.computed < one.target]])


def choose_micro_batch(
    micro_batches: Items[MicroBatch], length: int, *, asking: MicroBatch, rows: int, drafts: int = 0
) -> MicroBatch:
    """Return the micro-batch where a sequence of `length` positions adds the least cost, among those with nearly the fewest
    rows. A batch costs rows x longest row, so similar lengths belong together.

    `asking`, whose plan is being made, wins ties. `rows`: maximum rows of a micro-batch.
    """
    free = [micro_batch for micro_batch in micro_batches if len(micro_batch.members) < rows]
    if not free:
        return asking
    fewest = min(len(micro_batch.members) for micro_batch in micro_batches)
    slack = sum(len(micro_batch.members) for micro_batch in micro_batches) // SLACK
    near = [micro_batch for micro_batch in free if len(micro_batch.members) - fewest <= slack] or free

    def cost(micro_batch: MicroBatch) -> tuple[int, int, bool]:
        added = micro_batch.positions([length], drafts) - micro_batch.positions(drafts=drafts)
        return added // ALIKE, len(micro_batch.members), micro_batch is not asking

    return min(near, key=cost)
