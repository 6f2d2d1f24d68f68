"""Runner of one rank: execute(StepPlan) -> StepResult over its stage of the model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import mlx.core as mx

from tandem.comm.group import StageGroup, dispatch
from tandem.errors import BatchDesync, UnsupportedModel, UsageError
from tandem.guided.vocabulary import Vocabulary
from tandem.kv.store import KVDisk
from tandem.loading.prefix import Prefix
from tandem.loading.quantized_kv import Cache
from tandem.loading.stage import Apart, StageModel
from tandem.loading.weights import MLX_ERRORS
from tandem.protocol.adapters import AdapterLoaded, LoadAdapter
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, StoreOp
from tandem.protocol.logprobs import TokenLogprob
from tandem.protocol.step import PrefillOp, SpecDecodePlan, StepPlan, StepResult, by_id
from tandem.runner.digest import chained, digest
from tandem.runner.drafter import Drafted, Drafter
from tandem.runner.kv_buffer import Attention
from tandem.runner.kv_store import may_idle
from tandem.runner.links import LastTokens, StageLink, TokenInbox
from tandem.runner.micro_batch import MicroBatchState
from tandem.runner.picture_inputs import PictureInputs
from tandem.runner.pooler import Pooler, label_logprobs, vector_bytes
from tandem.runner.prefix_store import PrefixStore
from tandem.runner.prompt_rows import PromptRows, joined, only_pooled
from tandem.runner.prompt_scorer import Scores, score
from tandem.runner.sampler import Allowed, Sampled, Sampler


@dataclass
class PendingStep:
    """Dispatched step. `finish` may be called from any thread, as it only reads results."""

    plan: StepPlan
    started: float
    """Start of the step, in seconds of time.perf_counter()."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """Begin and end of each wait for other stages, in seconds of time.perf_counter()."""
    kv_bytes: int = 0
    prefix_bytes: int = 0
    ids: list[str] = field(default_factory=list)
    """Ids of sampled sequences in the order of `parts`, once per position."""
    parts: list[Sampled] = field(default_factory=list)
    tokens: list[mx.array] = field(default_factory=list)
    """Tokens int32, one array per part."""
    produced: mx.array | None = None
    """Tokens int32 of `ids` on the last stage, for further use by the computing thread."""
    outcome: mx.array | None = None
    """Tokens int32 [n], copied for the thread that waits for results, since MLX arrays must not be shared by threads. On
    other ranks a completion marker."""
    allowed: Allowed = field(default_factory=dict)
    vectors: list[tuple[str, mx.array]] = field(default_factory=list)
    """Pooled hidden states, float32 [H], on the last stage."""
    scores: dict[str, Scores] = field(default_factory=dict)
    """Log probabilities of prompt tokens, on the sampling rank."""
    drafted: Drafted | None = None
    received: list[mx.array] = field(default_factory=list)
    """uint32 digests of each forward pass's input from another stage, if the plan requests them."""
    made: list[mx.array] = field(default_factory=list)
    """uint32 digests of each forward pass's output, if another rank receives or also computes it. Logits gathered over a
    stage's ranks are included."""

    def busy_s(self, before: float, now: float) -> float:
        """Return the seconds that the device has computed this step until `now`; `before`: end of the previous step, which it
        computed while this one waited."""
        begin = max(self.started, before)
        return max(now - begin - sum(max(end - max(start, begin), 0.0) for start, end in self.waits), 0.0)

    def finish(self) -> StepResult:
        """Wait for the step and return its result. Tokens, in the plan's order, and vectors come only from the last stage."""
        vectors = {request_id: vector_bytes(vector) for request_id, vector in self.vectors}
        scores = {request_id: one.values() for request_id, one in self.scores.items()}
        values: Any = [] if self.outcome is None else self.outcome.tolist()
        chosen = by_id(self.ids, values) if self.parts else {}
        logprobs: dict[str, list[TokenLogprob]] = {}
        for part in self.parts:
            logprobs.update(part.logprobs())
        sampled = dict.fromkeys(self.plan.sampled()) if self.parts else ()
        order = [token for request_id in sampled for token in chosen[request_id]]
        drafts = self.drafted.values() if self.drafted is not None else {}
        return StepResult(self.plan.step_id, self.plan.micro_batch, order, logprobs, vectors, drafts, scores)

    def digest(self) -> tuple[int, int] | None:
        """Return digests of the stage's inputs and outputs in this step; wait for them. None if not requested, or no other
        rank holds the same data."""
        return (chained(self.received), chained(self.made)) if self.received or self.made else None


class Runner:
    """Executor of plans on one stage, with the KV of its micro-batches. Not thread-safe: one thread owns all MLX work of a
    process."""

    def __init__(
        self,
        stage: StageModel,
        *,
        micro_batches: int,
        stages: int = 1,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        link: StageLink | None = None,
        group: StageGroup | None = None,
        samples: bool = True,
        vocabulary: Vocabulary | None = None,
        drafts: int = 0,
        drafter: Drafter | None = None,
        head: bool = False,
        attention: Attention | None = None,
        disk: KVDisk | None = None,
        pictures: PictureInputs | None = None,
    ) -> None:
        """Store the collaborators. `link` connects the stages of a pipeline, `group` the ranks of this stage; None for a
        single one.

        `samples`: True on the one sampling rank, which needs `vocabulary` for grammars. `drafts`: maximum drafts per sequence
        in a plan; `drafter`: draft model or head, on the sampling rank; `head`: True on all ranks if it is a head.
        `attention` replaces mlx-lm's in decode steps; `disk`: disk cache, None without one; `pictures`: inputs from
        pictures, None for a model that takes none. Raises UnsupportedModel for drafts with a model whose
        caches cannot be trimmed.
        """
        if drafts and stage.changing_rope:
            raise UnsupportedModel(f"serve the model without speculative decoding: {stage.changing_rope}")
        self.stage = stage
        """Layers of this rank."""
        self._link = link
        self.disk = disk
        """Disk cache; None without one."""
        self.pictures = pictures
        """Inputs from pictures; None for a model that takes none."""
        self._prefixes = PrefixStore(disk)
        self._micro_batches = [
            MicroBatchState(stage.make_caches, self._prefixes, drafts, stage.one_by_one, attention) for _ in range(micro_batches)
        ]
        for one in self._micro_batches:
            one.store.idles = not stage.one_by_one and all(map(may_idle, stage.caches_of_all_stages()))
        self._group = group
        self._sampler = Sampler(vocab_size, eos_token_ids, vocabulary) if samples else None
        self._pooler = Pooler()
        self._prompt_rows = PromptRows.of(stage)
        self.drafter = drafter
        """Draft model or head, on the sampling rank; None without one."""
        self._head = head and stage.is_last
        self._last = LastTokens()
        self._inbox = TokenInbox(link, micro_batches + stages + 1, self._last) if link is not None and stage.is_first else None
        self.waiting = False
        """True while blocked on another stage. Readable from any thread."""

    def execute(self, plan: StepPlan, allowed: Allowed | None = None) -> PendingStep:
        """Build and dispatch one step; it usually computes while the next one is built.

        `allowed` restricts the tokens of the sequences that it names in this step.
        """
        pending = PendingStep(plan, time.perf_counter(), allowed=allowed or {})
        if plan.tidy:
            mx.clear_cache()
        micro_batch = self._micro_batches[plan.micro_batch]
        for request_id in plan.removes:
            next((one for one in self._micro_batches if request_id in one.held), micro_batch).remove(request_id)
        rows = plan.spec_decode_plan.rows if plan.spec_decode_plan and plan.moves else ()
        lengths = {row.request_id: row.length for row in rows}
        for move in plan.moves:
            source = self._micro_batches[move.source]
            self._micro_batches[move.target].take(move.request_id, source, lengths.get(move.request_id))
        for one, shape in zip(self._micro_batches, plan.kv_shapes, strict=False):
            one.store.allot(shape)
        for insert in plan.inserts:
            micro_batch.insert(insert)
        micro_batch.apply(plan)
        for keep in plan.keeps:
            self._keep(micro_batch, keep)
        self._update_tokens(plan)
        if self._inbox is not None:
            with self._waiting(pending):
                self._inbox.drain(plan.step_id)
        if plan.decode:
            self._decode(plan, micro_batch, pending)
        saves = {op.request_id: op for op in plan.saves}
        for ops in self._passes(plan, micro_batch):
            self._prefill(micro_batch, ops, pending)
            for op in ops:
                if op.request_id in saves and op.start + op.count >= saves[op.request_id].length:
                    if self.drafter is not None:
                        self.drafter.save(saves[op.request_id])
                    micro_batch.save(saves.pop(op.request_id))
            micro_batch.join([op.request_id for op in ops if op.last and op.samples])
        for store in plan.stores:
            self._prefixes.store(store)
        for key in plan.evicts:
            self._prefixes.evict(key)
            if self.drafter is not None:
                self.drafter.evict(key)
        self._hand_out(plan, pending)
        if self.drafter is not None and plan.spec_decode_plan is not None and plan.spec_decode_plan.ask:
            pending.drafted = self._draft(self.drafter, plan, plan.spec_decode_plan.ask, pending)
        if plan.digest:
            dispatch(pending.received, pending.made)
        pending.kv_bytes = sum(one.nbytes for one in self._micro_batches) + (self.drafter.nbytes if self.drafter else 0)
        pending.prefix_bytes = self._prefixes.nbytes + (self.drafter.prefix_bytes if self.drafter else 0)
        return pending

    def adapt(self, order: LoadAdapter, rank: int) -> AdapterLoaded:
        """Load or unload a LoRA adapter. What cannot be loaded is reported, and changes nothing."""
        index = order.adapter.index
        try:
            if order.unload:
                self.stage.adapters.unload(index)
            else:
                self.stage.adapters.load(index, order.directory or order.adapter.path)
        except (UsageError, OSError, *MLX_ERRORS) as error:
            return AdapterLoaded(rank, index, order.unload, str(error) or type(error).__name__)
        return AdapterLoaded(rank, index, order.unload)

    def _keep(self, micro_batch: MicroBatchState, op: StoreOp) -> None:
        """Queue disk blocks of a sequence for writing. Raises BatchDesync if they are not computed yet."""
        caches, length = micro_batch.caches(op.key)
        if self.disk is None or any((number + 1) * DISK_BLOCK_SIZE > length for number, _ in op.disk_blocks):
            raise BatchDesync(f"disk blocks of {op.key} are to be kept on disk, which are not here")
        self.disk.store(op, Prefix.of(caches, length))

    def _update_tokens(self, plan: StepPlan) -> None:
        """Update sampling state and last tokens for removed and inserted sequences."""
        for request_id in plan.removes:
            self._last.forget(request_id)
            self._pooler.forget(request_id)
            if self._inbox is not None:
                self._inbox.forget(request_id)
            if self._sampler is not None:
                self._sampler.remove(request_id)
        if self._sampler is not None:
            for op in plan.inserts:
                self._sampler.add(op.request_id, op.params, plan.sampling_seeds[op.request_id], op.tokens, op.prompt_len)
        if self.drafter is not None:
            self.drafter.follow(plan)

    def _decode(self, plan: StepPlan, micro_batch: MicroBatchState, pending: PendingStep) -> None:
        ids, order = micro_batch.store.ids, micro_batch.store.rows
        if plan.spec_decode_plan is not None:
            self._verify(plan, plan.spec_decode_plan, micro_batch, pending)
            return
        tokens = self._feedback(pending, ids)[:, None] if self.stage.is_first else None
        if tokens is not None and len(ids) < len(order):  # an idle row takes the token of the row before, or of the first
            tokens = tokens[mx.array([max(n - 1, 0) for n in accumulate(map(bool, order))], dtype=mx.int32)]
        self._choose_rows(micro_batch, order)
        hidden = self._forward(pending, (len(order), 1), tokens, micro_batch.store.batch())
        if len(ids) < len(order):
            hidden = hidden[mx.array([row for row, one in enumerate(order) if one], dtype=mx.int32)]
        if self._head and self.drafter is not None:
            for row, one in enumerate(ids):
                self.drafter.note(one, micro_batch.store.length(one) - 1, hidden, row, 1)
        self._sample(pending, hidden[:, -1:], ids)

    def _verify(self, plan: StepPlan, spec: SpecDecodePlan, micro_batch: MicroBatchState, pending: PendingStep) -> None:
        """Decode the plan's tokens with drafts, and sample after each of them."""
        order, width = micro_batch.store.rows, plan.width
        rows = {row.request_id: row for row in spec.rows}
        fed = [rows[one].tokens if one else [0] for one in order]
        self._choose_rows(micro_batch, order)
        caches = micro_batch.store.batch([len(row) for row in fed])
        hidden = self._forward(pending, (len(order), width), self._padded(fed, width), caches)
        if self._sampler is not None:
            for one in filter(None, order):
                self._sampler.place(one, rows[one].length + 1, rows[one].tokens)
        if self._head and self.drafter is not None:
            for number, one in enumerate(order):
                if one:
                    self.drafter.note(one, rows[one].length, hidden, number, len(rows[one].tokens))
        places = [row * width + i for row, given in enumerate(fed) if order[row] for i in range(len(given))]
        hidden = hidden.reshape(-1, 1, hidden.shape[-1])
        if len(places) < hidden.shape[0]:
            hidden = hidden[mx.array(places, dtype=mx.int32)]
        self._sample(pending, hidden, [one for one, given in zip(order, fed, strict=True) if one for _ in given])

    def _draft(self, drafter: Drafter, plan: StepPlan, count: int, pending: PendingStep) -> Drafted | None:
        """Draft tokens after the step's sampled ones; waits for those. None if nothing was sampled."""
        if pending.produced is None or not pending.ids:
            return None
        values: Any = pending.produced.tolist()
        return drafter.draft(plan, by_id(pending.ids, values), count, self._micro_batches[plan.micro_batch].store)

    def _passes(self, plan: StepPlan, micro_batch: MicroBatchState) -> list[list[PrefillOp]]:
        """Divide a step's chunks into forward passes, equal on all ranks."""
        if len(plan.prefill) < 2:
            return [[op] for op in plan.prefill]
        adapters = {op.request_id: micro_batch.held[op.request_id].insert.adapter for op in plan.prefill}
        return self._prompt_rows.passes(plan.prefill, adapters, pads=plan.pads)

    def _prefill(self, micro_batch: MicroBatchState, ops: list[PrefillOp], pending: PendingStep) -> None:
        """Compute chunks of prompts in one pass. Shorter ones are padded at the end, which causal attention ignores."""
        chunks = [micro_batch.chunk(op, alone=len(ops) == 1) for op in ops]
        width = self._prompt_rows.width(ops) if pending.plan.pads else max(op.count for op in ops)
        caches, *others = (own for _, own in chunks)
        if others:
            caches = [joined(rows) for rows in zip(caches, *others, strict=True)] if ops[0].start else self.stage.make_caches()
        self._choose_adapters(micro_batch, [op.request_id for op in ops])
        if self.pictures is not None:
            self.pictures.choose_chunks(ops, [micro_batch.held[op.request_id].insert for op in ops], width)
        hidden = self._forward(pending, (len(ops), width), self._padded([chunk for chunk, _ in chunks], width), caches)
        kept = [caches]
        if not others and width > ops[0].count:
            whole: Sequence[Any] = caches
            for cache in whole:
                cache.trim(width - ops[0].count)
        elif others:
            kept = [] if only_pooled(ops[0]) else micro_batch.divide(ops, caches)
        if self.stage.is_last:
            self._read(pending, micro_batch, ops, hidden)
        ends = [(row, op) for row, op in enumerate(ops) if op.last and op.samples]
        if ends:
            self._sample(pending, _at_ends(hidden, ends), [op.request_id for _, op in ends])
        if self._head:
            dispatch(hidden)  # on each rank of the stage, as its sums take all of them
        if self.drafter is not None:
            for row, op in enumerate(ops):
                if op.samples and op.pooling is None:
                    self.drafter.read_prompt(op.request_id, op.start, hidden, row, op.count)
        # A chunk without sampling is computed for its KV alone.
        dispatch([cache.state for own in kept for cache in own])

    def _padded(self, rows: Sequence[list[int]], width: int) -> mx.array | None:
        """Return token ids int32 [rows, width] for the first stage, padded at the end; None on other stages."""
        return mx.array([row + [0] * (width - len(row)) for row in rows], dtype=mx.int32) if self.stage.is_first else None

    def _read(self, pending: PendingStep, micro_batch: MicroBatchState, ops: list[PrefillOp], hidden: mx.array) -> None:
        """Compute what chunks request of their hidden states [rows, L, H]: vectors (of all positions for `mean`, else of the
        prompt's last one), log probabilities of their tokens, and those of labels after their prompts."""
        for row, op in enumerate(ops):
            if op.pooling is not None and not op.label_token_ids and (op.last or op.pooling == "mean"):
                own = slice(op.count) if op.pooling == "mean" else slice(op.count - 1, op.count)
                if (pooled := self._pooler.take(op, self.stage.final(hidden[row : row + 1, own]))) is not None:
                    pending.vectors.append((op.request_id, pooled))
            if op.prompt_logprobs is not None:
                tokens, states = micro_batch.following(op), hidden[row : row + 1, : op.count]
                found = score(self.stage, states, tokens, op.prompt_logprobs, samples=self._sampler is not None)
                if self._sampler is not None:
                    pending.scores[op.request_id] = found
        if ends := [(row, op) for row, op in enumerate(ops) if op.last and op.label_token_ids]:
            judged = label_logprobs(self.stage.head(_at_ends(hidden, ends))[:, 0], [op.label_token_ids for _, op in ends])
            pending.vectors += [(op.request_id, vector) for (_, op), vector in zip(ends, judged, strict=True)]

    def _sample(self, pending: PendingStep, hidden: mx.array, ids: list[str]) -> None:
        """Sample a token for each of `ids` from hidden states [ids, 1, H]; all ranks of the last stage take part.

        Rows of the head are divided over the ranks, and one rank samples. Other ranks that need the tokens get them inside
        the graph, as a sum with zeros. Dispatched at once, so that the device starts early.
        """
        pending.ids += ids
        if not self.stage.is_last:
            return
        logits = self.stage.head(hidden)[:, -1]
        if pending.plan.digest and self._group is not None:
            pending.made[-1] += digest(logits)
        if self._sampler is not None:
            if self._sampler.waits(ids):
                dispatch(logits)
            part = self._sampler.sample(logits, ids, pending.allowed)
            pending.parts.append(part)
            tokens, arrays = part.tokens, part.arrays
        else:
            tokens, arrays = mx.depends(mx.zeros((len(ids),), dtype=mx.int32), logits), []
        if self._group is not None and self._link is None and pending.plan.hands_out:
            tokens = self._group.sum(tokens)
        pending.tokens.append(tokens)
        dispatch([tokens, *arrays])

    def _choose_rows(self, micro_batch: MicroBatchState, ids: list[str]) -> None:
        """Choose the decoding sequences `ids` (empty: an idle row) for the next forward pass."""
        self._choose_adapters(micro_batch, ids)
        if self.pictures is not None:
            self.pictures.choose_rows([micro_batch.held[one].insert if one else None for one in ids])

    def _choose_adapters(self, micro_batch: MicroBatchState, ids: list[str]) -> None:
        """Choose the LoRA adapter of each of `ids` (empty: an idle row) for the next forward pass."""
        if self.stage.adapters.most:
            self.stage.adapters.choose([micro_batch.held[one].insert.adapter if one else 0 for one in ids])

    def _forward(
        self, pending: PendingStep, rows: tuple[int, int], tokens: mx.array | None, caches: Sequence[Cache] | Apart
    ) -> mx.array:
        """Run one forward pass over [rows, positions]. Input: tokens or the previous stage's output; output: to the next
        stage or the sampler."""
        step_id = pending.plan.step_id
        stage, width = (self.pictures, self.pictures.extra) if self.pictures is not None else (self.stage, 0)
        given = tokens if tokens is not None else self._receive(pending, (*rows, self.stage.hidden_size + width))
        hidden = stage.forward(given, caches)
        if pending.plan.digest and not self.stage.is_first:
            pending.received.append(digest(given))
        if pending.plan.digest and (self._group is not None or not self.stage.is_last):
            pending.made.append(digest(hidden))
        if self._link is not None and not self.stage.is_last:
            pending.outcome = hidden.reshape(-1)[:1].astype(mx.float32)
            # Dispatch before the send, whose thread then reads the buffer alone.
            dispatch(pending.outcome, pending.received, pending.made)
            self._link.send(hidden, step_id)
        return hidden

    def _receive(self, pending: PendingStep, shape: tuple[int, ...]) -> mx.array:
        assert self._link is not None
        with self._waiting(pending):
            return self._link.receive(shape, self.stage.dtype, pending.plan.step_id)

    @contextmanager
    def _waiting(self, pending: PendingStep) -> Iterator[None]:
        started = time.perf_counter()
        self.waiting = True
        yield
        self.waiting = False
        pending.waits.append((started, time.perf_counter()))

    def _feedback(self, pending: PendingStep, ids: list[str]) -> mx.array:
        """Return int32 [n]: the last token of each of `ids`, on the device."""
        if self._inbox is not None:
            with self._waiting(pending):
                self._inbox.await_tokens(ids)
        return self._last.of(ids)

    def _hand_out(self, plan: StepPlan, pending: PendingStep) -> None:
        """Pass the sampled tokens to the ranks that need them, on the device if possible."""
        if self._inbox is not None and plan.hands_out:
            self._inbox.expect(plan, pending.ids)
        if not pending.tokens:
            return
        pending.produced = pending.tokens[0] if len(pending.tokens) == 1 else mx.concatenate(pending.tokens)
        pending.outcome = pending.produced + 0
        if not plan.hands_out:
            pass
        elif self._link is None:
            self._last.put(pending.ids, pending.produced)
        elif self._sampler is not None:
            # Copy, as on CUDA two threads must not fetch the same buffer to the host at once.
            self._link.send(pending.produced + 0, plan.step_id)
        dispatch(pending.outcome)


def _at_ends(hidden: mx.array, ends: Sequence[tuple[int, PrefillOp]]) -> mx.array:
    """Return the hidden states [ends, 1, H] at the last positions of chunks in these rows of `hidden` [rows, L, H]."""
    rows, places = (mx.array(one) for one in zip(*((row, op.count - 1) for row, op in ends), strict=True))
    return hidden[rows, places][:, None]
