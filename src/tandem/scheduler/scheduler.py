"""Scheduler: a pure state machine without sockets, clocks or devices.

Inputs are requests and step results; outputs are plans and messages. Plans are built ahead of results. A continuing sequence
uses the token that ranks already hold. A finished one is removed a step later, and its surplus token dropped. Only the
scheduler decides which sequences are in a batch and when they end.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterator
from itertools import count, repeat

from tandem.kv.disk import DiskTier
from tandem.kv.index import PrefixIndex
from tandem.protocol.adapters import AdapterSpec
from tandem.protocol.control import EngineMessage, Output, Refused
from tandem.protocol.request import EngineRequest
from tandem.protocol.step import (
    NOT_FINITE,
    InsertOp,
    PrefillOp,
    SavePrefixOp,
    SpecDecodePlan,
    SpecDecodeRow,
    StepPlan,
    StepResult,
    batch_fingerprint,
    by_id,
)
from tandem.scheduler.batch_pool import RunningBatches
from tandem.scheduler.fair_queue import FairQueue
from tandem.scheduler.limits import Limits, check_admission
from tandem.scheduler.micro_batch import MicroBatch
from tandem.scheduler.migrations import Migrations
from tandem.scheduler.prompt_pace import PromptPace
from tandem.scheduler.quarantine import Quarantine
from tandem.scheduler.sequence import Sequence, no_token
from tandem.speculation.proposers import Speculation

BLOCKED_PLANS = 16
"""Plans for which a group without a running sequence waits for room before another group's sequence is preempted."""


class Scheduler:
    """Queue, micro-batches and plans in progress."""

    def __init__(self, limits: Limits, *, first_step: int = 0) -> None:
        """Create an empty scheduler. `first_step`: id of the first plan, as ranks may have executed others before."""
        self.sequences: dict[str, Sequence] = {}
        """Unfinished requests, and finished ones with tokens still in flight, by request id."""
        self.waiting: deque[Sequence] = deque()
        self.batches = RunningBatches(limits, self.waiting.appendleft)
        self.disk = DiskTier(checkpoints=not limits.prefix_trimmable)
        self.migrations = Migrations(self.disk, self._finish)
        self.fair_queue = FairQueue()
        self.speculation = Speculation(limits.speculation)
        self.prompts = PromptPace(limits.prefill_time_s)
        self.quarantine = Quarantine()
        self.admitted_tokens = 0
        """Total tokens of all sequences ever admitted from the queue."""
        self._under_way: dict[int, StepPlan] = {}
        self.had_pictures = False  # True once a request had some
        self._arrivals = count()
        self.next_step = first_step
        """Step id of the next plan."""

    # --- requests ---

    def submit(self, request: EngineRequest, seed: int, adapter: AdapterSpec | None = None) -> None:
        """Queue a request that uses `adapter`. Raises RequestError if it can never run, OverloadedError for a full queue."""
        check_admission(request, self.limits, self.sequences, self.waiting, self.queued_tokens)
        limits, proposer = self.limits, self.speculation.proposer(request)
        sequence = Sequence(request, seed, next(self._arrivals), limits.eos_token_ids, adapter=adapter, proposer=proposer)
        sequence.whole_pictures = limits.whole_pictures
        self.sequences[request.request_id] = sequence
        self.had_pictures |= sequence.awaits_pictures
        self.waiting.append(sequence)
        self.disk.seek(sequence, self.prefixes)
        self.migrations.enter(sequence)
        self.fair_queue.enter(request)

    @property
    def queued_tokens(self) -> int:
        """Total tokens of the waiting sequences."""
        return sum(len(sequence.tokens) for sequence in self.waiting)

    def abort(self, request_id: str) -> bool:
        """Abort a request without further output; return False if it is not live."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.finished:
            return False
        self._finish(sequence)
        return True

    # --- steps ---

    @property
    def limits(self) -> Limits:
        """Current limits."""
        return self.batches.limits

    @property
    def prefixes(self) -> PrefixIndex:
        """Prefixes cached in memory."""
        return self.batches.prefixes

    @property
    def _queue(self) -> deque[Sequence]:
        """Waiting sequences that can be admitted now."""
        embeds = self.prompts.embeds(self.batches.members())
        if embeds and not self.disk.fetching and not self.had_pictures:
            return self.waiting
        return deque(one for one in self.waiting if not one.held_back and (embeds or one.request.pooling is None))

    @property
    def under_way(self) -> int:
        """Number of plans without a result."""
        return len(self._under_way)

    @property
    def idle(self) -> bool:
        """True if no sequence is live, no plan is in progress, and no removal or eviction is pending."""
        removes = any(micro_batch.removes for micro_batch in self.batches.micro_batches)
        return not (self.sequences or self._under_way or self.prefixes.leaving or removes)

    @property
    def compiling(self) -> Sequence | None:
        """First sequence whose grammar is being compiled; None if there is none."""
        return next((one for one in self.batches.members() if one.awaits_grammar), None)

    @property
    def suspect(self) -> Sequence | None:
        """Suspect that is next in the queue while no other request runs, though it may have to wait; None otherwise."""
        if not self._queue or self.batches.running or self._under_way:
            return None
        first = self._first()
        return first if first.quarantine_record.suspect else None

    def next_plan(self) -> StepPlan | None:
        """Return the next plan; None if there is no work or enough plans are in progress."""
        if self.limits.stages > 1 and (plan := self._fill_stages()) is not None:
            return plan
        if len(self._under_way) >= len(self.batches.micro_batches) + self.limits.depth - 1:
            return None
        for micro_batch in sorted(self.batches.micro_batches, key=lambda one: (one.outstanding, one.last_step)):
            free = micro_batch.outstanding < self.limits.depth and not self._waits(micro_batch)
            if free and (plan := self._plan(micro_batch)) is not None:
                return plan
        return None

    def _fill_stages(self) -> StepPlan | None:
        """Return the next plan while prompts are computed over several stages; None to plan as without prompts.

        Sequences whose tokens are known decode first. Else their micro-batch computes chunks of its prompts alone, until one
        more than there are stages is in progress.
        """
        if all(one.decoding for one in self.batches.members()):
            return None
        room = sum(bool(plan.prefill) for plan in self._under_way.values()) <= self.limits.stages
        for micro_batch in sorted(self.batches.micro_batches, key=lambda one: (one.sampling, one.last_step)):
            pause = micro_batch.sampling > 0
            if pause and not (room and not micro_batch.names_tokens and micro_batch.prompts):
                continue
            if (plan := self._plan(micro_batch, pause=pause, chunks=room)) is not None:
                return plan
        return None

    def _waits(self, micro_batch: MicroBatch) -> bool:
        """Return True if the micro-batch's next plan must contain tokens, and so wait for results."""
        if not micro_batch.sampling or micro_batch.names_tokens:
            return micro_batch.sampling > 0
        return self.speculation.most > 0 and self._tries(micro_batch.decoding()) != (None, 0)

    def _plan(self, micro_batch: MicroBatch, *, pause: bool = False, chunks: bool = True) -> StepPlan | None:
        """Return the next plan of `micro_batch`; None without work. `pause`: without decoding; `chunks`: with prompts."""
        for sequence in [one for one in micro_batch.decoding() if one.complete]:
            micro_batch.drop(sequence)
        self.batches.make_room()
        self._make_way(micro_batch)
        decoding = micro_batch.decoding()
        decode = [] if pause else decoding
        spec = self._speculate(micro_batch, decode)
        inserts, restores = self._admit(micro_batch)
        fingerprint = batch_fingerprint([(s.request_id, s.computed) for s in micro_batch.members.values()])
        prefill = micro_batch.prefill(self._chunk() if chunks else 0, embeds=self.prompts.embeds(self.batches.members()))
        removes = [request_id for one in self.batches.micro_batches for request_id in one.removes]
        keeps = self.migrations.write(micro_batch)
        if not (removes or inserts or decode or prefill or keeps or self.prefixes.leaving):
            return None
        saves = [save for op in prefill if (save := self._save(micro_batch.members[op.request_id], op))]
        stores = self.disk.stores(self._lasting(micro_batch, saves, prefill), self.prefixes)
        plan = StepPlan(
            step_id=self.next_step,
            micro_batch=micro_batch.index,
            removes=removes,
            inserts=inserts,
            restores=restores,
            decode=[s.request_id for s in decode],
            prefill=prefill,
            saves=saves,
            stores=stores,
            keeps=keeps,
            evicts=self.prefixes.take_evicted(),
            fingerprint=fingerprint,
            sampling_seeds={op.request_id: self.sequences[op.request_id].seed for op in inserts},
            spec_decode_plan=spec,
            pause=pause and bool(decoding),
            digest=self.limits.digests,
            tidy=self.batches.pressed,
            pads=self.limits.pads(prefill),
            kv_shapes=self.batches.shapes(micro_batch, prefill),
        )
        self._commit(micro_batch, plan, decode, prefill)
        return plan

    def _chunk(self) -> int:
        """Return the prompt tokens allowed in the next step."""
        plans, limits = self.limits.stages + (self.limits.stages > 1), self.limits
        return self.prompts.chunk(limits.prefill_chunk, self.batches.members(), plans, limits.prefill_doubling)

    def _speculate(self, micro_batch: MicroBatch, decode: list[Sequence]) -> SpecDecodePlan | None:
        """Return the tokens that the micro-batch decodes from, with drafts. None if each sequence decodes one token from the
        one that ranks hold."""
        drafts, ask = (None, 0) if micro_batch.sampling else self._tries(decode)
        if not decode or (drafts is None and not ask and not micro_batch.names_tokens):
            return None
        told = self.speculation.model
        rows = [
            SpecDecodeRow(one.request_id, one.computed, [one.tokens[-1], *tries], one.untold() if told else [])
            for one, tries in zip(decode, drafts or repeat(()), strict=False)
        ]
        return SpecDecodePlan(rows, ask)

    def _tries(self, decode: list[Sequence]) -> tuple[list[list[int]] | None, int]:
        """Return the drafts worth trying, and the number to ask a draft model for, within the context, as rows are padded."""
        most = self.speculation.most
        most = most and min([most, *(self.limits.max_context - len(one.tokens) for one in decode)])
        return self.speculation.drafts(decode, most), self.speculation.ask(decode, most)

    def _commit(self, micro_batch: MicroBatch, plan: StepPlan, decode: list[Sequence], prefill: list[PrefillOp]) -> None:
        for op in prefill:
            micro_batch.members[op.request_id].advance(op.count)
        members = micro_batch.members
        for request_id in (*plan.sampled(), *plan.ended()):
            members[request_id].inflight += 1
        for group, rows in Counter([sequence.request.group for sequence in decode]).items():
            self.fair_queue.charge(group, rows)
        for sequence in decode:
            sequence.computed = len(sequence.tokens) + sequence.inflight - 1
        for sequence in decode if plan.spec_decode_plan is not None else ():
            sequence.told = len(sequence.tokens)
        micro_batch.sent(plan)
        for one in self.batches.micro_batches:
            one.removes = []
        self._under_way[plan.step_id] = plan
        self.next_step += 1

    def _admit(self, micro_batch: MicroBatch) -> tuple[list[InsertOp], list[SavePrefixOp]]:
        inserts: list[InsertOp] = []
        restores: list[SavePrefixOp] = []
        while self._queue and not (self.batches.pressed and self.batches.running):
            sequence = self._first()
            if self.batches.micro_batch_for(sequence, micro_batch) is not micro_batch:
                break  # it joins with the next plan of that micro-batch
            may_join = self.quarantine.may_join(sequence, self.batches.members())
            if sequence.inflight or not may_join or not self.batches.fits(micro_batch, sequence):
                break
            self.waiting.remove(sequence)
            self.admitted_tokens += len(sequence.tokens)
            micro_batch.members[sequence.request_id] = sequence
            hit = None if sequence.whole else self.prefixes.lookup(sequence.blocks(len(sequence.tokens) - 1))
            if hit is not None:
                restores.append(SavePrefixOp(sequence.request_id, hit.key, hit.length))
            inserts.append(sequence.enter(micro_batch.index, hit.length if hit else 0))
            self.batches.limit_prefixes()
            self.fair_queue.charge(sequence.request.group, sequence.target - sequence.computed)
            keeps = self.prefixes.enabled and sequence.request.pooling is None  # embedding prompts are not repeated
            sequence.save_points = sequence.savable(self._save_points(sequence)) if keeps else []
        return inserts, restores

    def _save_points(self, sequence: Sequence) -> list[int]:
        length, on_disk = len(sequence.tokens), self.disk.shares(sequence)
        return self.prefixes.save_points(length, sequence.blocks(length), cached=sequence.computed, on_disk=on_disk)

    def _first(self) -> Sequence:
        """Return the waiting sequence to admit next."""
        return next(self._suspects(), None) or self.fair_queue.first(self._queue)

    def _suspects(self) -> Iterator[Sequence]:
        """Yield the waiting suspects, which run alone."""
        return (sequence for sequence in self._queue if sequence.quarantine_record.suspect)

    def _save(self, sequence: Sequence, op: PrefillOp) -> SavePrefixOp | None:
        """Save the prompt's KV, cut to whole blocks, if this chunk reaches a save point; None otherwise."""
        if op.start + op.count not in sequence.save_points or self.batches.pressed:
            return None
        saved = self.prefixes.save(sequence.hashes(op.start + op.count))
        if saved is None:
            return None
        self.disk.delete(saved.drops)
        return SavePrefixOp(sequence.request_id, saved.key, saved.length, saved.takes)

    def _lasting(self, micro_batch: MicroBatch, saves: list[SavePrefixOp], prefill: list[PrefillOp]) -> set[str]:
        """Return the keys of prefixes to write to disk: new ones, and cached ones of warm-up requests."""
        ended = (micro_batch.members[op.request_id] for op in prefill if op.last)
        warmed = (one for one in ended if one.request.warms and one.request.on_disk)
        old = (self.prefixes.holding(one.hashes(self.prefixes.save_point(len(one.tokens)))) for one in warmed)
        new = ((save.key, micro_batch.members[save.request_id]) for save in saves)
        return {key for key, one in new if one.request.on_disk and one not in self.migrations} | {*filter(None, old)}

    def _make_way(self, micro_batch: MicroBatch) -> None:
        """Preempt a sequence of the most served group if the next group has had no place for `BLOCKED_PLANS`."""
        if self.batches.pressed or not self._queue or (sequence := self._first()).quarantine_record.suspect:
            return
        running = Counter(one.request.group for one in self.batches.members())
        if running[sequence.request.group] or self.batches.fits(micro_batch, sequence):
            return
        sequence.blocked += 1
        several = [one for one in micro_batch.members.values() if running[one.request.group] > 1]
        if sequence.blocked >= BLOCKED_PLANS and several:
            group = max((one.request.group for one in several), key=self.fair_queue.account)
            self.batches.preempt(one for one in several if one.request.group == group)

    # --- results ---

    def compiled(self, request_id: str) -> None:
        """Record that a sequence's grammar is compiled; unknown ids are ignored."""
        if (sequence := self.sequences.get(request_id)) is not None:
            sequence.awaits_grammar = False

    def update(self, result: StepResult, now: float | None = None, busy_s: float = 0.0) -> list[EngineMessage]:
        """Process a step's result, for which the slowest rank computed `busy_s` seconds; return the messages for clients.

        `now`: seconds of a monotonic clock, to measure step costs. None: not measured, so speculative decoding never starts.
        """
        plan = self._under_way.pop(result.step_id)
        micro_batch = self.batches.micro_batches[plan.micro_batch]
        ahead = micro_batch.returned(plan)
        if not plan.decode:
            ends = [op.start + op.count for op in plan.prefill]
            self.disk.computed(sum(op.count for op in plan.prefill), max(ends, default=0), busy_s)
        for op in plan.prefill:
            if (prompted := self.sequences.get(op.request_id)) is not None:
                prompted.got(op.start + op.count)
                if op.request_id in result.prompt_logprobs:
                    prompted.score(op.start, result.prompt_logprobs[op.request_id])
        outputs = [message for request_id in plan.ended() if (message := self._take_end(request_id, result))]
        rows = {row.request_id: row for row in plan.spec_decode_plan.rows} if plan.spec_decode_plan else {}
        for request_id, tokens in by_id(plan.sampled(), result.tokens).items():
            sequence = self.sequences[request_id]
            sequence.inflight -= len(tokens)
            if not sequence.finished:
                output = self.speculation.accept(sequence, rows[request_id], tokens) if request_id in rows else tokens
                outputs.append(self._take(sequence, output, result))
                if result.drafts:
                    sequence.hear(result)
            elif not sequence.inflight:
                del self.sequences[request_id]
        seconds = None if plan.pause else micro_batch.took(now)
        paused = any(one.pause for one in self._under_way.values())
        self.speculation.took(plan, None if paused else seconds, ahead=ahead)
        self.prompts.took(plan, now, seconds, busy_s, self._under_way.values(), staged=self.limits.stages > 1)
        return outputs

    def _take(self, sequence: Sequence, tokens: list[int], result: StepResult) -> EngineMessage:
        """Append new tokens until one of them ends the sequence; return the output or refusal."""
        if tokens[0] < 0:
            return self.fail(sequence, tokens[0])
        before, request_id = len(sequence.tokens), sequence.request_id
        prompt_logprobs = sequence.take_logprobs() if (first := before == sequence.prompt_len) else None
        if prompt_logprobs is not None and not prompt_logprobs.finite:
            return self.fail(sequence, NOT_FINITE)
        reason = sequence.append(tokens)
        sequence.got(len(sequence.tokens))
        if len(tokens) > 1:
            tokens = sequence.tokens[before:]
            self.fair_queue.charge(sequence.request.group, len(tokens) - 1)
        if sequence.proposer is not None:
            sequence.read()
            if sequence.micro_batch is not None and sequence.decoding:  # rejected drafts take no position
                sequence.computed = len(sequence.tokens) + sequence.inflight - 1
        if reason:
            self._finish(sequence)
        elif sequence.yields and sequence.micro_batch is not None and any(self._suspects()):
            self.batches.micro_batches[sequence.micro_batch].drop(sequence)  # the next suspect's turn to run alone
            self.waiting.appendleft(sequence)
        logprobs = result.logprobs[request_id][: len(tokens)] if request_id in result.logprobs else []
        if not first:
            return Output(request_id, tokens, logprobs, reason, reason == "stop")
        cached, read = sequence.cached, sequence.from_disk
        return Output(request_id, tokens, logprobs, reason, reason == "stop", cached, read, prompt_logprobs=prompt_logprobs)

    def _take_end(self, request_id: str, result: StepResult) -> EngineMessage | None:
        """Return the output of a sequence that ends with its prompt; None for one that was aborted."""
        sequence, vector = self.sequences[request_id], result.vectors.get(request_id, b"")
        sequence.inflight -= 1
        if sequence.finished:
            del self.sequences[request_id]
            return None
        found = sequence.take_logprobs()
        if not (sequence.request.warms or (found.finite if found is not None else vector)):
            return self.fail(sequence, NOT_FINITE)
        self._finish(sequence)
        reason = "stop" if sequence.request.pooling else "length"
        cached, read = sequence.cached, sequence.from_disk
        return Output(
            request_id, finish_reason=reason, cached_tokens=cached, disk_tokens=read, vector=vector, prompt_logprobs=found
        )

    def fail(self, sequence: Sequence, why: int) -> Refused:
        """Fail a sequence with error code `why` in place of a token. Prefixes that gave non-finite logits are discarded,
        since a transient device fault may have damaged them for every request."""
        if why == NOT_FINITE:
            hashes = sequence.hashes(len(sequence.tokens))
            self.prefixes.discard(hashes)
            self.disk.discard(hashes)
        self._finish(sequence)
        return no_token(sequence.request_id, why)

    def _finish(self, sequence: Sequence) -> None:
        sequence.finished = True
        self.fair_queue.leave(sequence.request)
        if sequence.micro_batch is not None:
            self.batches.micro_batches[sequence.micro_batch].drop(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        if not sequence.inflight:
            del self.sequences[sequence.request_id]

    # --- starting again ---

    def restart(self, *, died: bool = True, blame: bool = True) -> list[EngineMessage]:
        """Queue all sequences again with their tokens, in order of arrival, as their ranks have ended.

        `died`: False if ranks ended on purpose; `blame`: False if no request can be at fault. A death while idle clears all
        suspects, as another cause kills ranks. Suspects are next, and run alone (protocol/quarantine.py). Returns refusals
        for requests that are not retried.
        """
        if died and not (self._under_way or self.compiling or any(one.encoding for one in self.sequences.values())):
            for sequence in self.sequences.values():
                sequence.quarantine_record.clear()
        elif died and blame:
            self.quarantine.accuse(self.sequences, self._under_way.values())
        self._under_way.clear()
        self.speculation.forget()
        self.batches.restart()
        self.disk.reset()
        self.migrations.forget()
        self.waiting.clear()
        refused: list[EngineMessage] = []
        for request_id, sequence in list(self.sequences.items()):
            sequence.leave()
            sequence.inflight = 0
            refusal = self.quarantine.restart(sequence)
            if not sequence.finished and refusal is None:
                self.waiting.append(sequence)
                continue
            del self.sequences[request_id]
            if refusal is not None:
                self.fair_queue.leave(sequence.request)
                refused.append(refusal)
        return refused

    def resize(self, limits: Limits, why: str) -> list[EngineMessage]:
        """Change the limits; call only right after `restart`. Return refusals, starting with `why`, for requests that no
        longer fit."""
        assert not self._under_way
        self.batches.resize(limits)
        refused: list[EngineMessage] = []
        for sequence in list(self.waiting):
            need = sequence.prompt_len + sequence.request.params.max_tokens
            if need > min(limits.kv_tokens, limits.max_context):
                self._finish(sequence)
                refused.append(Refused(sequence.request_id, 503, f"{why} for {need} tokens", code="degraded"))
        return refused

    def refuse_without(self, adapters: Collection[AdapterSpec]) -> list[EngineMessage]:
        """End the waiting sequences that use none of `adapters` nor the base; return their refusals."""
        lost = [one for one in self.waiting if one.adapter is not None and one.adapter not in adapters]
        for sequence in lost:
            self._finish(sequence)
        return [Refused(one.request_id, 503, "Its LoRA adapter is not loaded any more.", "adapter_not_loaded") for one in lost]

    def widen(self, limits: Limits) -> None:
        """Raise the limits while requests run."""
        self.batches.widen(limits)
