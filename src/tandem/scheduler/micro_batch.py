"""One of the independent batches that keep the stages of a pipeline busy at the same time."""

from __future__ import annotations

from collections.abc import Container, Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field

from tandem.kv.budget import batch_positions
from tandem.protocol.step import KVShape, PrefillOp, StepPlan
from tandem.scheduler.sequence import Sequence

PATIENCE = 4
"""Steps in a row that serve the shortest prompts first, before the oldest one gets its turn."""
SLACK = 3
"""Rows for each of which a micro-batch may have one more than the emptiest. With more than that it takes none: stages take
turns, and wait where micro-batches differ much."""
ALIKE = 256
"""Positions by which two costs may differ and still count as equal."""


@dataclass(eq=False)
class MicroBatch:
    """Members in the order in which the ranks got them, and what the next plan must take away."""

    index: int
    step: int = 1
    """Least number of positions by which its rows grow."""
    shape: KVShape = KVShape()
    """Capacity of its KV buffer after the plans sent so far."""
    members: dict[str, Sequence] = field(default_factory=dict)
    removes: list[str] = field(default_factory=list)
    outstanding: int = 0
    """Plans sent whose results are not back."""
    _ahead: set[int] = field(default_factory=set)
    """Ids of outstanding plans that were sent before the previous result came back."""
    _shortest_first: int = 0
    """Steps since a prompt went first because others had gone before it."""
    last_step: int = -1
    names_tokens: bool = False
    """The ranks do not hold the last tokens of its sequences: the next plan names them, so it waits for results."""
    result_at: float | None = None
    """When the last result came, if the micro-batch went on decoding at once."""

    def drop(self, sequence: Sequence) -> None:
        """Remove a member from the batch; the next plan informs the ranks."""
        del self.members[sequence.request_id]
        self.removes.append(sequence.request_id)
        sequence.leave()

    def sent(self, plan: StepPlan) -> None:
        """A plan for it goes out."""
        if self.outstanding:
            self._ahead.add(plan.step_id)
        self.names_tokens = not plan.hands_out
        self.outstanding += 1
        self.last_step = plan.step_id

    def returned(self, plan: StepPlan) -> bool:
        """Record the result of `plan`. True if it was sent before the previous plan's result came back."""
        self.outstanding -= 1
        ahead = plan.step_id in self._ahead
        self._ahead.discard(plan.step_id)
        return ahead

    def took(self, now: float | None) -> float | None:
        """Seconds that the step took whose result came `now`, if the micro-batch went from the one before straight on to it."""
        since, self.result_at = self.result_at, now if self.decoding() else None
        return None if now is None or since is None else now - since

    def decoding(self) -> list[Sequence]:
        """Members whose prompt is done, in joining order."""
        return [sequence for sequence in self.members.values() if sequence.decoding]

    def positions(self, extra: Iterable[int] = (), drafts: int = 0) -> int:
        """KV positions that the micro-batch needs after its next step, with up to `drafts` drafts a row and with rows of
        `extra` lengths added."""
        return batch_positions([*(max(s.computed + 1 + drafts, s.target) for s in self.members.values()), *extra], self.step)

    def occupied(self, drafts: int) -> int:
        """KV positions that the micro-batch takes until its prompts have joined: what it needs, or its buffer beside them."""
        prompts = sum(s.target for s in self.members.values() if not s.decoding)
        return max(self.positions(drafts=drafts), self.shape.size + prompts)

    def rows(self, joins: Container[str], more: int) -> list[int]:
        """Lengths of the rows of its KV buffer, each `more` than is computed; those of `joins` are about to join."""
        return [
            max(s.computed + more, s.target) for s in self.members.values() if s.samples and (s.decoding or s.request_id in joins)
        ]

    def prompt_positions(self, joins: Container[str], prefill: Iterable[PrefillOp]) -> int:
        """KV positions of members that are in no row, nor about to join, once these chunks are computed."""
        prompts = {
            s.request_id: s.computed for s in self.members.values() if not (s.samples and (s.decoding or s.request_id in joins))
        }
        return sum(prompts.values()) + sum(op.count for op in prefill if op.request_id in prompts)

    def prefill(self, budget: int, *, embeds: bool = True) -> list[PrefillOp]:
        """Spend up to `budget` positions on prompts, without texts to embed unless `embeds`: the shortest rest first,
        but nobody is passed over for long. The last chunk of one whose grammar is being compiled waits."""
        waiting = [s for s in self.members.values() if not s.decoding and (embeds or s.request.pooling is None)]
        overdue = next((s for s in waiting if min(s.skipped, self._shortest_first) >= PATIENCE and not s.awaits_grammar), None)
        self._shortest_first = 0 if overdue else self._shortest_first + 1
        waiting.sort(key=lambda s: 0 if s is overdue else s.target - s.computed)
        chunks = []
        for sequence in waiting:
            end = sequence.save_point if sequence.computed < sequence.save_point else sequence.target
            count = min(budget, end - sequence.computed)
            last = sequence.computed + count == sequence.target
            if count <= 0 or (last and sequence.awaits_grammar):
                sequence.skipped += 1
                continue
            budget -= count
            request = sequence.request
            chunks.append(
                PrefillOp(
                    sequence.request_id,
                    sequence.computed,
                    count,
                    last,
                    request.pooling,
                    sequence.samples,
                    request.params.prompt_logprobs if sequence.lacks_logprobs(sequence.computed + count) else None,
                )
            )
            sequence.skipped = 0
        return chunks


def choose_micro_batch(
    micro_batches: Items[MicroBatch], length: int, *, asking: MicroBatch, rows: int, drafts: int = 0
) -> MicroBatch:
    """The micro-batch in which a sequence of `length` positions costs least, of those that have nearly the fewest rows:
    a batch costs rows x longest, so lengths that are alike belong together.

    `asking` is taken where several are as good, since its plan is being made. `rows`: most rows of a micro-batch.
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
