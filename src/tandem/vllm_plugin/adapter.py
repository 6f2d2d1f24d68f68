"""Conversion of vLLM's SchedulerOutput to Tandem's StepPlan. Pure and deterministic: all workers get the same outputs.

vLLM picks the sequences of each step independently; Tandem's runner decodes whole micro-batches. A step becomes one plan for the
micro-batch with most of the step's decoding sequences. Other sequences of the step move there; decoding ones that are not in the
step move out. With pipeline stages vLLM keeps several disjoint batches in flight. Each settles in its own micro-batch, so moves
are rare.

KV is stored in rows, not in vLLM's blocks. A prefix that vLLM considers computed is restored from a cached prefix. Positions
that no cached prefix has are recomputed, invisibly to vLLM.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from tandem.errors import BatchDesync
from tandem.kv.budget import batch_positions
from tandem.kv.index import PrefixIndex, block_hashes
from tandem.protocol.request import SamplingParams
from tandem.protocol.step import (
    InsertOp,
    MoveOp,
    PrefillOp,
    SavePrefixOp,
    SpecDecodePlan,
    SpecDecodeRow,
    StepPlan,
    batch_fingerprint,
)
from tandem.vllm_plugin.params import translate

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass
class _HeldRequest:
    """State of a request on the ranks."""

    prompt_len: int
    params: SamplingParams
    seed: int
    tokens: list[int] = field(default_factory=list)
    """Tokens to prefill before decoding: the prompt and, after a preemption, the output so far."""
    micro_batch: int = -1
    """Index of its micro-batch; -1 while the ranks do not hold the request: new or preempted."""
    computed: int = 0
    """KV positions present once all plans so far have run."""
    decoding: bool = False
    latest: int = 0
    """Last sampled token; kept only with speculative decoding."""


@dataclass
class _Ops:
    """Operations of the plan under construction."""

    removes: list[str] = field(default_factory=list)
    moves: list[MoveOp] = field(default_factory=list)
    inserts: list[InsertOp] = field(default_factory=list)
    restores: list[SavePrefixOp] = field(default_factory=list)
    prefill: list[PrefillOp] = field(default_factory=list)
    saves: list[SavePrefixOp] = field(default_factory=list)
    seeds: dict[str, int] = field(default_factory=dict)


class PlanBuilder:
    """Builds plans that follow vLLM's scheduler."""

    def __init__(
        self,
        *,
        stages: int,
        kv_tokens: int,
        chunk: int,
        prefix_tokens: int,
        trimmable: bool,
        prefix_extra: int = 0,
        window: int = 0,
        drafts: bool = False,
    ) -> None:
        """Store the limits.

        `stages` is the number of pipeline stages. `kv_tokens` is the number of KV positions that vLLM allocates; `chunk` the
        maximum of prompt positions in one forward pass. `prefix_tokens` limits the positions of cached prefixes, which
        running sequences evict; 0 turns them off. `trimmable` is True if caches can be truncated. `prefix_extra` is the
        additional cost of a cached prefix, in positions, for SSM states; `window` is the largest sliding window. With
        `drafts` vLLM schedules draft tokens, and the caller passes each step's tokens to `sampled` before the next `plan`.
        """
        self.micro_batches = stages + 1
        """Number of micro-batches: one per batch in flight, and a last one for sequences that wait."""
        self._kv_tokens = kv_tokens
        self._chunk = chunk
        self._drafts = drafts
        self._prefixes = PrefixIndex(prefix_tokens, trimmable=trimmable, extra=prefix_extra, checkpoint=prefix_extra + window)
        self._members: list[dict[str, None]] = [{} for _ in range(self.micro_batches)]
        self._sequences: dict[str, _HeldRequest] = {}
        self._step = 0
        self._last_micro_batch = -1
        self.recomputed = 0
        """Positions that vLLM counted as cached and no cached prefix had."""

    def plan(self, output: SchedulerOutput) -> StepPlan | None:
        """Return the plan of one step; None if the ranks have nothing to do. Raises BatchDesync."""
        ops = _Ops()
        self._leave(output, ops)
        fresh = self._arrivals(output, ops)
        tried, counts = self._tried(output)
        decode = [request_id for request_id in counts if request_id not in fresh and self._sequences[request_id].decoding]
        micro_batch = self._choose(decode)
        self._gather(micro_batch, list(counts), fresh, decode, ops)
        for request_id, computed in fresh.items():
            self._insert(micro_batch, request_id, computed, ops)
        if not (counts or ops.removes):
            return None
        spec = self._spec_decode(decode, tried) if self._drafts and decode else None
        fingerprint = batch_fingerprint(
            (request_id, self._sequences[request_id].computed) for request_id in self._members[micro_batch]
        )
        for request_id, count in counts.items():
            self._advance(request_id, fresh.get(request_id, self._sequences[request_id].computed) + count, ops)
        self._make_room()
        rows = [request_id for request_id in self._members[micro_batch] if self._sequences[request_id].decoding]
        ends = {op.request_id for op in ops.prefill if op.last}
        plan = StepPlan(
            step_id=self._step,
            micro_batch=micro_batch,
            removes=ops.removes,
            moves=ops.moves,
            inserts=ops.inserts,
            restores=ops.restores,
            decode=decode,
            prefill=ops.prefill,
            saves=ops.saves,
            evicts=self._prefixes.take_evicted(),
            sampling_seeds=ops.seeds,
            fingerprint=fingerprint,
            spec_decode_plan=spec,
            pause=not decode and any(request_id not in ends for request_id in rows),
        )
        self._step += 1
        self._last_micro_batch = micro_batch
        return plan

    def sampled(self, request_id: str, tokens: list[int]) -> None:
        """Record the tokens sampled for a request."""
        if tokens:
            self._sequences[request_id].latest = tokens[-1]

    # --- drafts ---

    def _tried(self, output: SchedulerOutput) -> tuple[dict[str, list[int]], dict[str, int]]:
        """Return drafts by request id, and the number of positions to compute. vLLM pads missing drafts with -1."""
        tried, counts = {}, dict(output.num_scheduled_tokens)
        for request_id, drafts in output.scheduled_spec_decode_tokens.items():
            tried[request_id] = list(takewhile(lambda token: token >= 0, drafts))
            counts[request_id] -= len(drafts) - len(tried[request_id])
        return tried, counts

    def _spec_decode(self, decode: list[str], tried: dict[str, list[int]]) -> SpecDecodePlan:
        """Return every row's tokens explicitly, since the ranks do not know which drafts were accepted."""
        return SpecDecodePlan(
            [
                SpecDecodeRow(
                    request_id,
                    self._sequences[request_id].computed,
                    [self._sequences[request_id].latest, *tried.get(request_id, ())],
                )
                for request_id in decode
            ]
        )

    # --- removals and arrivals ---

    def _leave(self, output: SchedulerOutput, ops: _Ops) -> None:
        for request_id in sorted(output.finished_req_ids):
            self._drop(request_id, ops)
            self._sequences.pop(request_id, None)
        for request_id in sorted(output.preempted_req_ids or ()):
            self._drop(request_id, ops)

    def _drop(self, request_id: str, ops: _Ops) -> None:
        """Remove a sequence from the ranks and keep its record, since vLLM may resume it."""
        sequence = self._sequences.get(request_id)
        if sequence is None or sequence.micro_batch < 0:
            return
        del self._members[sequence.micro_batch][request_id]
        ops.removes.append(request_id)
        sequence.micro_batch, sequence.computed, sequence.decoding = -1, 0, False

    def _arrivals(self, output: SchedulerOutput, ops: _Ops) -> dict[str, int]:
        """Set the `tokens` of sequences to insert; return them with the positions that vLLM considers computed. Raises
        BatchDesync."""
        fresh: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            prompt = list(new.prompt_token_ids)
            self._drop(new.req_id, ops)
            known = self._sequences.get(new.req_id)
            if known is None:
                params = translate(new.sampling_params)
                seed = params.seed if params.seed is not None else secrets.randbits(63)
                known = self._sequences[new.req_id] = _HeldRequest(len(prompt), params, seed)
            known.tokens = list(new.prefill_token_ids or prompt)
            fresh[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            sequence = self._sequences[request_id]
            if request_id in cached.resumed_req_ids:
                self._drop(request_id, ops)
            if sequence.micro_batch < 0:
                sequence.tokens = list(cached.all_token_ids[request_id])
                fresh[request_id] = computed
            elif self._drafts and sequence.decoding and computed < sequence.computed:
                sequence.computed = computed  # some drafts were rejected
            elif computed != sequence.computed:
                raise BatchDesync(
                    f"BATCH DESYNC DETECTED: vLLM has {computed} positions of {request_id}, the ranks have {sequence.computed}"
                )
        return fresh

    # --- choice of the micro-batch ---

    def _choose(self, decode: list[str]) -> int:
        """Return the micro-batch with most of the decoding sequences; without any, the emptiest, preferably not the last one
        used."""
        micro_batches_of = [self._sequences[request_id].micro_batch for request_id in decode]
        micro_batches = range(self.micro_batches - 1)
        best = max(micro_batches, key=lambda micro_batch: micro_batches_of.count(micro_batch))
        if micro_batches_of.count(best):
            return best
        return min(
            micro_batches, key=lambda micro_batch: (len(self._members[micro_batch]), micro_batch == self._last_micro_batch)
        )

    def _gather(self, micro_batch: int, scheduled: list[str], fresh: dict[str, int], decode: list[str], ops: _Ops) -> None:
        """Move the scheduled sequences into `micro_batch`, and other decoding sequences out of it."""
        if decode:
            for request_id in list(self._members[micro_batch]):
                if self._sequences[request_id].decoding and request_id not in scheduled:
                    self._move(request_id, self.micro_batches - 1, ops)
        for request_id in scheduled:
            if request_id not in fresh and self._sequences[request_id].micro_batch != micro_batch:
                self._move(request_id, micro_batch, ops)

    def _move(self, request_id: str, target: int, ops: _Ops) -> None:
        sequence = self._sequences[request_id]
        ops.moves.append(MoveOp(request_id, sequence.micro_batch, target))
        del self._members[sequence.micro_batch][request_id]
        self._members[target][request_id] = None
        sequence.micro_batch = target

    # --- computation ---

    def _insert(self, micro_batch: int, request_id: str, computed: int, ops: _Ops) -> None:
        sequence = self._sequences[request_id]
        sequence.micro_batch = micro_batch
        self._members[micro_batch][request_id] = None
        ops.inserts.append(InsertOp(request_id, sequence.tokens, sequence.prompt_len, sequence.params))
        ops.seeds[request_id] = sequence.seed
        hit = self._prefixes.lookup(block_hashes(sequence.tokens[:computed])) if computed else None
        if hit is not None:
            ops.restores.append(SavePrefixOp(request_id, hit.key, hit.length))
            sequence.computed = hit.length
        self.recomputed += computed - sequence.computed

    def _advance(self, request_id: str, target: int, ops: _Ops) -> None:
        """Add operations that compute the sequence's positions up to `target`."""
        sequence = self._sequences[request_id]
        if sequence.decoding:
            sequence.computed = target
            return
        total = len(sequence.tokens)
        save_point = self._prefixes.save_point(total) if self._prefixes.enabled else 0
        while sequence.computed < target:
            stop = min(sequence.computed + self._chunk, target)
            if sequence.computed < save_point < stop:
                stop = save_point
            ops.prefill.append(PrefillOp(request_id, sequence.computed, stop - sequence.computed, stop == total))
            sequence.computed = stop
            if stop == save_point and (cached_prefix := self._prefixes.save(block_hashes(sequence.tokens[:stop]))) is not None:
                ops.saves.append(SavePrefixOp(request_id, cached_prefix.key, cached_prefix.length, cached_prefix.takes))
        sequence.decoding = target == total

    def _make_room(self) -> None:
        """Evict cached prefixes if running sequences need their memory."""
        used = sum(batch_positions(self._sequences[request_id].computed for request_id in members) for members in self._members)
        self._prefixes.shrink(used + self._prefixes.positions - self._kv_tokens)
