"""State of one micro-batch on one rank: sequences in prefill, and decoding sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tandem.errors import BatchDesync
from tandem.loading.quantized_kv import Cache
from tandem.protocol.step import InsertOp, PrefillOp, SavePrefixOp, StepPlan, batch_fingerprint
from tandem.runner.kv_buffer import Attention
from tandem.runner.kv_store import KVStore, make_store, reserve
from tandem.runner.prefix_store import PrefixStore
from tandem.runner.prompt_rows import rows_of


@dataclass(eq=False)
class Held:
    """Sequence on the rank; `caches` is None once its KV has moved into the store."""

    insert: InsertOp
    caches: list[Cache] | None = field(default_factory=list)
    """Empty before the first chunk."""
    length: int = 0
    """KV positions in `caches`."""
    row: int | None = None
    """Row of the sequence in `caches` of the pass that computed the end of its prompt, shared by others; None for its own."""


class MicroBatchState:
    """One micro-batch on a rank: applies plans and checks the result against the engine's fingerprint."""

    def __init__(
        self,
        make_caches: Callable[[], list[Cache]],
        prefixes: PrefixStore,
        drafts: int = 0,
        one_by_one: str = "",
        attention: Attention | None = None,
    ) -> None:
        """Create an empty micro-batch. `prefixes`: shared by all micro-batches of the rank; `drafts`: maximum drafts per
        sequence and step. `one_by_one`: reason for computing rows separately, empty for batches. `attention`: attention of
        decode steps, None for mlx-lm's."""
        self._prefixes, self._make_caches = prefixes, make_caches
        self.held: dict[str, Held] = {}
        self.store = make_store(make_caches, drafts, one_by_one, attention)

    def insert(self, op: InsertOp) -> None:
        """Add a sequence whose prompt is not computed yet."""
        self.held[op.request_id] = Held(op)

    def apply(self, plan: StepPlan) -> None:
        """Restore prefixes, trim rejected drafts and check the fingerprint. Raises BatchDesync before anything is computed."""
        for op in plan.restores:
            held = self.held[op.request_id]
            held.caches, held.length = self._prefixes.restore(op.key, op.length), op.length
        if plan.spec_decode_plan is not None:
            self._cut(plan)
        mine = batch_fingerprint(self.lengths())
        if mine != plan.fingerprint or (not plan.pause and set(self.store.ids) != set(plan.decode)):
            raise BatchDesync(
                f"BATCH DESYNC DETECTED: Fingerprint mismatch at step {plan.step_id}: local={mine}, "
                f"plan={plan.fingerprint}, local_requests={self.lengths()}, decode={plan.decode}"
            )

    def _cut(self, plan: StepPlan) -> None:
        """Trim rows to their valid lengths, without rejected drafts."""
        rows = {} if plan.spec_decode_plan is None else {row.request_id: row for row in plan.spec_decode_plan.rows}
        for request_id, row in rows.items():
            if request_id not in self.store:
                raise BatchDesync(
                    f"BATCH DESYNC DETECTED: {request_id} is to be cut to {row.length} positions in step "
                    f"{plan.step_id}, and does not decode here"
                )
            try:
                self.store.cut(request_id, row.length)
            except ValueError as error:
                raise BatchDesync(f"BATCH DESYNC DETECTED: {request_id} in step {plan.step_id}: {error}") from error
        if any(one not in rows or not rows[one].tokens for one in plan.decode):
            raise BatchDesync(f"BATCH DESYNC DETECTED: step {plan.step_id} does not say what {plan.decode} decode from")

    def remove(self, request_id: str) -> None:
        """Drop a sequence and its KV. Raises BatchDesync if it is missing."""
        held = self.held.pop(request_id, None)
        if held is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {request_id} is to be removed, and is not here")
        if held.caches is None:
            self.store.leave(request_id)

    def take(self, request_id: str, source: MicroBatchState, length: int | None = None) -> None:
        """Move a sequence and its KV here from another micro-batch, cut to `length` positions if it decodes.

        Raises BatchDesync if it is missing.
        """
        held = source.held.pop(request_id, None)
        if held is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {request_id} is to move, and is not in the micro-batch that it leaves")
        if held.caches is None:
            if length is not None:
                source.store.cut(request_id, length)
            self.store.join(request_id, source.store.extract(request_id), source.store.length(request_id))
            source.store.leave(request_id)
        self.held[request_id] = held

    def lengths(self) -> list[tuple[str, int]]:
        """Return (request id, KV positions held), in the order of insertion."""
        return [(one, self.store.length(one) if held.caches is None else held.length) for one, held in self.held.items()]

    def chunk(self, op: PrefillOp, *, alone: bool) -> tuple[list[int], list[Cache]]:
        """Return the tokens of a prompt chunk, and the caches that it extends: none for a first chunk in a pass that it
        shares, which is not `alone`."""
        held = self.held[op.request_id]
        if held.caches is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {op.request_id} decodes already, the plan still has its prompt")
        held.length += op.count
        if alone:
            held.caches = held.caches or self._make_caches()
            reserve(held.caches, 0 if op.last else len(held.insert.tokens) - op.start)
        return held.insert.tokens[op.start : op.start + op.count], held.caches

    def divide(self, ops: Sequence[PrefillOp], caches: list[Cache]) -> list[list[Cache]]:
        """Assign the rows of `caches`, of a pass that these chunks share. Return the caches to compute: rows of unfinished
        prompts are copied, others join the store from the pass's caches."""
        held = [self.held[op.request_id] for op in ops]
        for row, (op, one) in enumerate(zip(ops, held, strict=True)):
            ends = op.last and op.samples
            one.caches, one.row = (caches, row) if ends else (rows_of(caches, [row], [one.length]), None)
        return [caches, *(one.caches for one in held if one.caches and one.row is None)]

    def following(self, op: PrefillOp) -> list[int]:
        """Return the prompt tokens that follow each of the chunk's positions; none follows the prompt's last one."""
        insert = self.held[op.request_id].insert
        return insert.tokens[op.start + 1 : min(op.start + op.count + 1, insert.prompt_len)]

    def save(self, op: SavePrefixOp) -> None:
        """Save a prompt's KV as a cached prefix."""
        held = self.held[op.request_id]
        if held.caches is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {op.request_id} decodes already, its prompt is to be saved")
        caches = held.caches if held.row is None else rows_of(held.caches, [held.row], [op.length])
        self._prefixes.save(op.key, caches, held.length, op.length, op.takes)

    def caches(self, request_id: str) -> tuple[list[Cache], int]:
        """Return a sequence's caches (copies if it decodes) and their KV positions. Raises BatchDesync if it is missing."""
        held = self.held.get(request_id)
        if held is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {request_id} is to be kept, and is not here")
        if held.caches is not None:
            return held.caches, held.length
        return self.store.extract(request_id), self.store.length(request_id)

    def join(self, request_ids: Sequence[str]) -> None:
        """Move the KV of these sequences of one pass into the store, as their prompts are computed."""
        joining = [self.held[request_id] for request_id in request_ids]
        rows = [one.row for one in joining if one.row is not None]
        caches = joining[0].caches if joining else None
        if caches is not None and rows:
            assert isinstance(self.store, KVStore)
            lengths = [one.length for one in joining]
            self.store.join_rows(request_ids, rows_of(caches, rows, lengths), lengths)
        elif caches is not None:
            self.store.join(request_ids[0], caches, joining[0].length)
        for one in joining:
            one.caches = one.row = None

    @property
    def nbytes(self) -> int:
        """Bytes of KV in the store and in sequences in prefill."""
        prompts = (held.caches for held in self.held.values() if held.caches is not None)
        return self.store.nbytes + sum(int(cache.nbytes) for caches in prompts for cache in caches)
