"""Running batches of all micro-batches, which share the KV budget with cached prefixes. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Items

from tandem.kv.budget import growth_step, kv_shape, rounded
from tandem.kv.index import PrefixIndex
from tandem.protocol.step import KVShape, PrefillOp
from tandem.scheduler.limits import Limits
from tandem.scheduler.micro_batch import MicroBatch, choose_micro_batch, longest_row
from tandem.scheduler.sequence import Sequence

HEADROOM = 64
"""Output positions that must fit beside the prompt before a request is admitted."""


class RunningBatches:
    """Micro-batches and cached prefixes within one KV budget. Sequences are preempted when it is exceeded."""

    def __init__(self, limits: Limits, requeue: Callable[[Sequence], None]) -> None:
        """Create empty batches. `requeue` puts a preempted sequence at the head of the queue."""
        self._requeue = requeue
        self.pressed = False
        """True while a device's memory is nearly full: no sequence joins a batch, and no prefix is cached."""
        self.preemptions = 0
        self.resize(limits)

    def resize(self, limits: Limits) -> None:
        """Reset to empty batches and no prefixes, within `limits`."""
        self.limits = limits
        self.prefixes = PrefixIndex(
            limits.prefix_tokens,
            trimmable=limits.prefix_trimmable,
            extra=limits.prefix_extra,
            checkpoint=limits.prefix_checkpoint,
            every=limits.prefix_every,
        )
        self.restart()

    def restart(self) -> None:
        """Empty all batches and drop the prefixes, as their ranks are lost."""
        self.prefixes.clear()
        step = growth_step(self.limits.kv_tokens, self.limits.max_batch_size)
        self.micro_batches = [MicroBatch(i, step) for i in range(self.limits.micro_batches)]

    def widen(self, limits: Limits) -> None:
        """Raise the limits; batches and prefixes stay."""
        assert limits.micro_batches == self.limits.micro_batches and limits.kv_tokens >= self.limits.kv_tokens
        self.limits = limits
        self.prefixes.widen(limits.prefix_tokens)

    # --- members ---

    def members(self) -> Iterator[Sequence]:
        """Return the sequences of all batches."""
        return (sequence for micro_batch in self.micro_batches for sequence in micro_batch.members.values())

    @property
    def running(self) -> int:
        """Number of sequences in all batches."""
        return sum(len(micro_batch.members) for micro_batch in self.micro_batches)

    def micro_batch_for(self, sequence: Sequence, asking: MicroBatch) -> MicroBatch:
        """Return the micro-batch in which a waiting sequence costs least; `asking` wins ties."""
        return choose_micro_batch(
            self.micro_batches, self._length(sequence), asking=asking, rows=self.limits.rows, drafts=self._drafts
        )

    def fits(self, micro_batch: MicroBatch, sequence: Sequence) -> bool:
        """Return True if the micro-batch has a free row and KV room for the sequence and its prompt. The first sequence
        always fits."""
        if len(micro_batch.members) >= self.limits.rows or self.running >= self.limits.max_batch_size:
            return False
        before, after = (micro_batch.positions(more, self._drafts) for more in ([], [self._length(sequence)]))
        need = sum(self._needs) - before + after
        return not self.running or need + len(sequence.tokens) + self.prefixes.spared <= self.limits.kv_tokens

    def _length(self, sequence: Sequence) -> int:
        """Return the KV positions that must be free to admit a sequence."""
        rest = sequence.request.params.max_tokens - sequence.produced
        return len(sequence.tokens) + min(rest, HEADROOM) + self._drafts

    def preempt(self, sequences: Iterable[Sequence]) -> None:
        """Preempt the youngest of `sequences`; it resumes before requests that came after it."""
        youngest = max(sequences, key=lambda sequence: sequence.number)
        self.micro_batches[youngest.micro_batch or 0].drop(youngest)
        self.preemptions += 1
        self._requeue(youngest)

    def relieve(self) -> bool:
        """Preempt the youngest sequence; return False if at most one runs."""
        if several := self.running > 1:
            self.preempt(self.members())
        return several

    # --- room ---

    @property
    def _drafts(self) -> int:
        """Maximum drafts per sequence and step."""
        return self.limits.speculation.drafts if self.limits.speculation else 0

    @property
    def kv_positions(self) -> int:
        """KV positions in use by batches, or about to be."""
        return sum(map(MicroBatch.occupied, self.micro_batches, self._needs))

    @property
    def _needs(self) -> list[int]:
        """KV positions needed by each batch's next step."""
        return [micro_batch.positions(drafts=self._drafts) for micro_batch in self.micro_batches]

    def make_room(self) -> None:
        """Evict prefixes, then preempt the youngest sequences, until the next step fits into the KV cache."""
        needed = self.limit_prefixes()
        while needed > self.limits.kv_tokens and self.relieve():
            needed = sum(self._needs)

    def limit_prefixes(self) -> int:
        """Evict prefixes beyond the KV positions left by batches. Return the positions that the next steps need."""
        free = self.limits.kv_tokens - (needed := sum(needs := self._needs))
        occupied = sum(map(MicroBatch.occupied, self.micro_batches, needs))
        room = max(self.limits.kv_tokens - occupied, min(free, self.prefixes.spared))
        self.prefixes.limit(0 if self.pressed else room)
        return needed

    def shapes(self, micro_batch: MicroBatch, prefill: Items[PrefillOp]) -> list[KVShape]:
        """Set and return the capacity of each micro-batch's KV buffer for `micro_batch`'s next plan, with these prompt
        chunks.

        Buffers get spare capacity only within the room left by all sequences, the prefixes and one more prompt. It is taken
        back, in any micro-batch, if the limit would be exceeded.
        """
        limits, micro_batches, cached = self.limits, self.micro_batches, self.prefixes.positions
        joins = {op.request_id for op in prefill if op.last and op.samples}
        chunks = {op.request_id: op.count for op in prefill}
        rows, prompts = zip(*(one.split(joins) for one in micro_batches), strict=True)
        drafts = self._drafts
        longest = [longest_row(rows[i], drafts + (one is micro_batch)) for i, one in enumerate(micro_batches)]
        least = [len(rows[i]) * rounded(longest[i], one.step) for i, one in enumerate(micro_batches)]
        computed = [sum(one.computed + chunks.get(one.request_id, 0) for one in parts) for parts in prompts]
        for i, one in enumerate(micro_batches):
            others = sum(other.occupied(other.positions(drafts=drafts)) for other in micro_batches if other is not one)
            room = limits.kv_tokens - cached - others - computed[i] - longest[i]
            one.shape = kv_shape(one.shape, len(rows[i]), longest[i], most=limits.rows, room=max(room, least[i]))
        for i in sorted(range(len(micro_batches)), key=lambda i: least[i] - micro_batches[i].shape.size):
            if cached + sum(computed) + sum(one.shape.size for one in micro_batches) > limits.kv_tokens:
                micro_batches[i].shape = kv_shape(KVShape(), len(rows[i]), longest[i], room=least[i])
        return [one.shape for one in micro_batches]
