"""Draft model on the sampling rank: small and not split, it proposes next tokens (mlx).

It gets all information from plans, and computes itself how many drafts were accepted. Its rows hold the KV of all accepted
tokens. Tokens it has not seen, such as a prompt, are fed before drafting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import mlx.core as mx

from tandem.comm.group import dispatch
from tandem.errors import BatchDesync
from tandem.loading.quantized_kv import Cache
from tandem.loading.stage import StageModel
from tandem.protocol.step import SpecDecodeRow, StepPlan, accepted
from tandem.runner.kv_store import KVStore

CHUNK = 512
"""Maximum tokens fed in one forward pass."""


@dataclass
class _Known:
    tokens: list[int]
    """All tokens of the sequence received from plans."""
    held: int = 0
    """Tokens whose KV is in the draft model's row."""
    tried: int = 0
    """Draft tokens after those whose KV is in the row too."""


@dataclass
class Drafted:
    """Draft tokens of one step; lazy until evaluated."""

    ids: list[str]
    tokens: mx.array
    """int32 [ids, drafts]: draft tokens."""

    def values(self) -> dict[str, list[int]]:
        """Return the drafts by request id; wait for the device."""
        found: list[list[int]] = self.tokens.tolist()  # type: ignore[assignment]
        return dict(zip(self.ids, found, strict=True))


class Drafter:
    """Draft model with the KV of a runner's micro-batches. Not thread-safe: used by the thread that owns MLX."""

    def __init__(self, stage: StageModel, *, micro_batches: int, drafts: int, vocab_size: int) -> None:
        """Store the model. `stage`: the whole draft model; `vocab_size`: the target model's; `drafts`: maximum drafts
        requested."""
        self.stage = stage
        """Whole draft model, as one stage."""
        self._drafts = drafts
        self._vocab = min(vocab_size, stage.vocab_size)
        self._stores = [KVStore(stage.make_caches, drafts, over_steps=True) for _ in range(micro_batches)]
        self._known: dict[str, _Known] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of KV of all micro-batches."""
        return sum(store.nbytes for store in self._stores)

    def follow(self, plan: StepPlan) -> None:
        """Apply a plan's removals, insertions and tokens. Raises BatchDesync for a gap in the tokens."""
        for request_id in plan.removes:
            self._known.pop(request_id, None)
            for store in self._stores:
                if request_id in store:
                    store.leave(request_id)
        for insert in plan.inserts:
            self._known[insert.request_id] = _Known(list(insert.tokens))
        if (spec := plan.spec_decode_plan) is None:
            return
        for row in spec.rows:
            self._name(row)
            if not spec.ask:
                self._known[row.request_id].tried = 0  # the number of accepted drafts will not be reported

    def draft(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]], count: int) -> Drafted:
        """Draft `count` tokens for each sequence in `sampled`: request id -> tokens sampled in this step."""
        rows = {row.request_id: row for row in plan.spec_decode_plan.rows} if plan.spec_decode_plan else {}
        store = self._stores[plan.micro_batch]
        for request_id, tokens in sampled.items():
            known = self._known[request_id]
            taken = accepted(rows[request_id].tokens, tokens) if request_id in rows else 0
            known.held += min(known.tried, taken)
            known.tried = 0
            known.tokens += [max(token, 0) for token in tokens[: taken + 1]]
        for request_id in store.ids:
            if request_id not in sampled:
                store.leave(request_id)
                self._known[request_id].held = self._known[request_id].tried = 0
        for request_id in sampled:
            self._catch_up(request_id, store)
        return self._guess(store, count)

    # ---- inside

    def _name(self, row: SpecDecodeRow) -> None:
        """Update the known tokens of a sequence up to the row's first token. Raises BatchDesync for a gap."""
        known = self._known[row.request_id]
        missing = row.length + 1 - len(known.tokens)
        if missing > len(row.past) + 1:
            raise BatchDesync(
                f"BATCH DESYNC DETECTED: the draft model knows {len(known.tokens)} tokens of "
                f"{row.request_id}, and {len(row.past)} before position {row.length} are named"
            )
        if missing > 0:
            known.tokens += [*row.past, *row.tokens[:1]][-missing:]
        else:
            del known.tokens[row.length + 1 :]
        known.held = min(known.held, len(known.tokens))

    def _catch_up(self, request_id: str, store: KVStore) -> None:
        """Feed a sequence's tokens until one batched step can process the rest."""
        known = self._known[request_id]
        caches: list[Cache] | None = None
        if request_id not in store:
            caches, known.held = self.stage.make_caches(), 0
        else:
            store.cut(request_id, known.held)
            if len(known.tokens) - known.held > 1 + self._drafts:
                caches = store.extract(request_id)
                store.leave(request_id)
        if caches is None:
            return
        while (rest := len(known.tokens) - 1 - known.held) > 0:
            chunk = known.tokens[known.held : known.held + min(rest, CHUNK)]
            self.stage.forward(mx.array([chunk], dtype=mx.int32), caches)
            mx.eval([cache.state for cache in caches])
            known.held += len(chunk)
        store.join(request_id, caches, known.held)

    def _guess(self, store: KVStore, count: int) -> Drafted:
        ids = store.ids
        fed = [self._known[one].tokens[self._known[one].held :] for one in ids]
        width = max(map(len, fed))
        tokens = mx.array([row + [0] * (width - len(row)) for row in fed], dtype=mx.int32)
        hidden = self._forward(tokens, store.batch([len(row) for row in fed]))
        last = mx.array([len(row) - 1 for row in fed], dtype=mx.int32)[:, None, None]
        hidden = mx.take_along_axis(hidden, last, axis=1)
        for one in ids:
            known = self._known[one]
            known.held, known.tried = len(known.tokens), count - 1
        guesses = [self._likeliest(hidden)]
        while len(guesses) < count:
            dispatch(guesses[-1])
            guesses.append(self._likeliest(self._forward(guesses[-1][:, None], store.batch())))
        found = mx.stack(guesses, axis=1)
        dispatch(found)
        return Drafted(ids, found)

    def _forward(self, tokens: mx.array, caches: list[Cache]) -> mx.array:
        # Ids beyond the draft model's vocabulary only pad the target's, and stand for no text.
        return self.stage.forward(mx.minimum(tokens, self.stage.vocab_size - 1), caches)

    def _likeliest(self, hidden: mx.array) -> mx.array:
        """Return int32 [rows]: the most likely tokens, from hidden states [rows, 1, H]."""
        return mx.argmax(self.stage.head(hidden)[:, -1, : self._vocab], axis=-1).astype(mx.int32)
