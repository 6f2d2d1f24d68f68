"""One micro-batch's batch on one rank: sequences whose prompt is being computed, and those that decode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tandem.errors import BatchDesync
from tandem.loading.quantized_kv import Cache
from tandem.protocol.step import InsertOp, PrefillOp, SavePrefixOp, StepPlan, batch_fingerprint
from tandem.runner.kv_buffer import Attention
from tandem.runner.kv_store import make_store
from tandem.runner.prefix_store import PrefixStore


@dataclass(eq=False)
class Held:
    """A sequence as the rank knows it; `caches` is None once its KV has moved into the store."""

    insert: InsertOp
    caches: list[Cache] | None
    length: int = 0
    """Positions that `caches` hold."""


class MicroBatchState:
    """Follows plans to the letter and checks that it ends where the engine thinks it does."""

    def __init__(
        self,
        make_caches: Callable[[], list[Cache]],
        prefixes: PrefixStore,
        drafts: int = 0,
        one_by_one: str = "",
        attention: Attention | None = None,
    ) -> None:
        """`prefixes` is shared by all micro-batches of the rank; `drafts` is the most drafts of a sequence in one step;
        `one_by_one`: why rows are computed apart from one another, if they are; `attention`: of decode steps."""
        self._prefixes = prefixes
        self.held: dict[str, Held] = {}
        self.store = make_store(make_caches, drafts, one_by_one, attention)

    def insert(self, op: InsertOp, caches: list[Cache]) -> None:
        """Register a sequence before anything of it is computed."""
        self.held[op.request_id] = Held(op, caches)

    def apply(self, plan: StepPlan) -> None:
        """Restores, cuts, then the fingerprint. Raises BatchDesync before anything is computed."""
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
        """Take back what was computed from drafts that were not accepted."""
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
        """Drop a sequence and its KV. Raises BatchDesync if it is not there."""
        held = self.held.pop(request_id, None)
        if held is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {request_id} is to be removed, and is not here")
        if held.caches is None:
            self.store.leave(request_id)

    def take(self, request_id: str, source: MicroBatchState) -> None:
        """Take a sequence over from another micro-batch, its KV included. Raises BatchDesync if it is not there."""
        held = source.held.pop(request_id, None)
        if held is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {request_id} is to move, and is not in the micro-batch that it leaves")
        if held.caches is None:
            self.store.join(request_id, source.store.extract(request_id), source.store.length(request_id))
            source.store.leave(request_id)
        self.held[request_id] = held

    def lengths(self) -> list[tuple[str, int]]:
        """(request id, positions that its caches really hold), in the order of insertion."""
        return [
            (request_id, self.store.length(request_id) if held.caches is None else held.length)
            for request_id, held in self.held.items()
        ]

    def chunk(self, op: PrefillOp) -> tuple[list[int], list[Cache]]:
        """Tokens of one prompt chunk, and the caches that it extends."""
        held = self.held[op.request_id]
        if held.caches is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {op.request_id} decodes already, the plan still has its prompt")
        held.length += op.count
        return held.insert.tokens[op.start : op.start + op.count], held.caches

    def following(self, op: PrefillOp) -> list[int]:
        """The prompt's tokens that come after each of the chunk's positions; of the last position of all none does."""
        insert = self.held[op.request_id].insert
        return insert.tokens[op.start + 1 : min(op.start + op.count + 1, insert.prompt_len)]

    def save(self, op: SavePrefixOp) -> None:
        """Keep a prompt's KV for prompts to come."""
        held = self.held[op.request_id]
        if held.caches is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {op.request_id} decodes already, its prompt is to be saved")
        self._prefixes.save(op.key, held.caches, held.length, op.length)

    def caches(self, request_id: str) -> tuple[list[Cache], int]:
        """A sequence's caches, copied where it decodes, and how many positions they hold. Raises BatchDesync if it is
        not there."""
        held = self.held.get(request_id)
        if held is None:
            raise BatchDesync(f"BATCH DESYNC DETECTED: {request_id} is to be kept, and is not here")
        if held.caches is not None:
            return held.caches, held.length
        return self.store.extract(request_id), self.store.length(request_id)

    def join(self, request_id: str) -> None:
        """The prompt is done: move the sequence's KV into the store."""
        held = self.held[request_id]
        assert held.caches is not None
        self.store.join(request_id, held.caches, held.length)
        held.caches = None

    @property
    def nbytes(self) -> int:
        """Bytes of KV in the store and in prompts under way."""
        prompts = (held.caches for held in self.held.values() if held.caches is not None)
        return self.store.nbytes + sum(int(cache.nbytes) for caches in prompts for cache in caches)
