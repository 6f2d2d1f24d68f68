"""Draft model or draft head on the sampling rank: small and not split, it proposes next tokens (mlx).

It gets all information from plans, and computes itself how many drafts were accepted. Its rows hold the KV of all accepted
tokens. It reads a prompt beside the model's own chunks, and what it lacks, as after a prefix hit, in chunks of the next steps,
so that no step waits for all of it. A head reads each token together with the model's hidden state of the position before,
which the runner notes. A cached prefix has the head's KV too, since a hit computes no states. Positions whose state is missing
are left out of the head's KV: only its accuracy suffers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from tandem.comm.group import dispatch
from tandem.errors import BatchDesync, UnsupportedModel
from tandem.kv.files import FilePart
from tandem.kv.parts import KVSlice
from tandem.kv.store import HeadKV, KVDisk
from tandem.loading.prefix import Prefix, trimmable
from tandem.loading.quantized_kv import Cache
from tandem.loading.stage import StageModel
from tandem.protocol.kv_blocks import BLOCK_SIZE
from tandem.protocol.step import SavePrefixOp, SpecDecodeRow, StepPlan, accepted
from tandem.runner.heads.mtp import MTPHead
from tandem.runner.heads.prefix import HeadPrefix, disk_layers
from tandem.runner.heads.separate import DFlashHead, Eagle3Head
from tandem.runner.kv_store import KVStore, reserve

CHUNK = 512
"""Maximum tokens fed in one forward pass, and of those that a draft model lacks in one step."""
MOST_STATES = 512
"""Maximum hidden states of a sequence that are kept for a head while no drafts are requested."""


@dataclass
class _Known:
    tokens: list[int]
    """All tokens of the sequence received from plans."""
    reads: bool
    """False if the sequence never gets drafts, so that a head does not read it."""
    held: int = 0
    """Leading tokens that are read."""
    skipped: int = 0
    """Tokens of `held` without KV in the row: for a head the first one, and those whose states are missing."""
    tried: int = 0
    """Draft tokens after those whose KV is in the row too."""
    caches: list[Cache] | None = None
    """Caches of what is read, while the sequence has no row."""
    states: list[tuple[mx.array, int, range]] = field(default_factory=list)
    """Hidden states that a head has not read, from position `held - 1` on: array [B, L, H], row and positions in it."""
    noted: int = 0
    """Position after the last of them."""
    ends: mx.array | None = None
    """For a head: the model's hidden states [1, blocks, W] at the last position of each KV block so far."""

    @property
    def row_length(self) -> int:
        """Positions in the row, without drafts."""
        return self.held - self.skipped

    @property
    def pending(self) -> int:
        """Number of states not read."""
        return self.noted - self.held + 1 if self.states else 0

    def note(self, position: int, states: mx.array, row: int, count: int) -> None:
        """Append `count` states from `position` on. Later ones of rejected drafts are dropped, the oldest above `MOST_STATES`
        too."""
        first = self.held - 1
        if position > first + self.pending:
            self._skip(position - first)
            self.states.clear()
        if (kept := max(position - first, 0)) < self.pending:
            self.states = self._take(kept)
        self.states.append((states, row, range(count)))
        self.noted = position + count

    def forget(self) -> None:
        """Drop the oldest states above `MOST_STATES`."""
        if (surplus := self.pending - MOST_STATES) > 0:
            self._take(surplus)
            self._skip(surplus)

    def read(self, count: int) -> mx.array:
        """Return states [1, count, H] of the next positions, and drop them."""
        parts = [states[row : row + 1, part.start : part.stop] for states, row, part in self._take(count)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)

    def _skip(self, positions: int) -> None:
        self.held += positions
        self.skipped += positions

    def _take(self, count: int) -> list[tuple[mx.array, int, range]]:
        """Return the first `count` states, and drop them."""
        taken = []
        while count and self.states:
            states, row, part = self.states[0]
            taken.append((states, row, part[:count]))
            self.states[:1] = [(states, row, part[count:])] if len(part) > count else []
            count -= len(taken[-1][2])
        return taken


@dataclass
class Drafted:
    """Draft tokens of one step; lazy until evaluated."""

    ids: list[str]
    tokens: mx.array
    """int32 [ids, drafts]: draft tokens."""

    def __post_init__(self) -> None:
        dispatch(self.tokens)

    def values(self) -> dict[str, list[int]]:
        """Return the drafts by request id; wait for the device."""
        found: list[list[int]] = self.tokens.tolist()  # type: ignore[assignment]
        return dict(zip(self.ids, found, strict=True))


class Drafter:
    """Draft model or head, with the KV of a runner's micro-batches. Not thread-safe: used by the thread that owns MLX."""

    def __init__(self, stage: StageModel | Eagle3Head, *, micro_batches: int, drafts: int, vocab_size: int) -> None:
        """Store the model. `stage`: the whole draft model, or a draft head; `vocab_size`: the target model's; `drafts`: maximum
        drafts requested.

        Raises UnsupportedModel for a draft model whose sequences cannot be computed together.
        """
        if stage.one_by_one:
            raise UnsupportedModel(
                f"the draft model decodes its sequences one by one, as {stage.one_by_one}: name another one", param="draft_model"
            )
        self.stage = stage
        """Whole draft model, as one stage, or draft head."""
        self._head = stage if isinstance(stage, MTPHead | Eagle3Head) else None
        self._drafts = drafts
        self._vocab = min(vocab_size, stage.vocab_size)
        self._stores = [KVStore(stage.make_caches, drafts, over_steps=True) for _ in range(micro_batches)]
        self._known: dict[str, _Known] = {}
        self._prefixes: dict[str, HeadPrefix] = {}
        """A head's part of cached prefixes, by their keys."""
        self._asked = True
        """True unless the last plan that decoded asked for no drafts."""
        self._room = 0
        """Tokens that may be fed in this step before drafting."""

    @property
    def nbytes(self) -> int:
        """Bytes of KV of all micro-batches."""
        apart = sum(int(cache.nbytes) for known in self._known.values() for cache in known.caches or ())
        return apart + sum(store.nbytes for store in self._stores)

    @property
    def prefix_bytes(self) -> int:
        """Bytes of a head's KV in cached prefixes."""
        return sum(array.nbytes for kept in self._prefixes.values() for array in (*kept.kv.arrays, kept.ends))

    def keep_on(self, disk: KVDisk, where: KVSlice, dtype: mx.Dtype) -> None:
        """Keep a head's KV on disk too, in the files of slice `where`. `dtype`: compute type."""
        if self._head is not None and (layers := disk_layers(self._head, dtype)) is not None:
            disk.head = HeadKV(layers, FilePart(where, layers.kind), self._stored, self._fetched)

    def follow(self, plan: StepPlan) -> None:
        """Apply a plan's removals, insertions and tokens. Raises BatchDesync for a gap in the tokens."""
        for request_id in plan.removes:
            self._known.pop(request_id, None)
            for store in self._stores:
                if request_id in store:
                    store.leave(request_id)
        for insert in plan.inserts:
            first, params = int(self._head is not None), insert.params
            reads = not (params.penalised or params.structured_outputs is not None)
            self._known[insert.request_id] = _Known(list(insert.tokens), reads, first, first)
        for op in plan.restores:
            known = self._known[op.request_id]
            if op.key in self._prefixes and op.length > 1 and known.reads:
                kept, blocks = self._prefixes[op.key], op.length // BLOCK_SIZE
                known.caches, known.ends = kept.kv.revived(op.length - 1), kept.ends[:, :blocks]
                known.held = known.noted = op.length
                known.states = [(kept.ends, 0, range(blocks - 1, blocks))] if op.length == blocks * BLOCK_SIZE else []
        if plan.decode:
            self._asked = plan.spec_decode_plan is not None and plan.spec_decode_plan.ask > 0
        if (spec := plan.spec_decode_plan) is None:
            return
        for row in spec.rows:
            self._name(row)
            if not spec.ask:
                self._known[row.request_id].tried = 0  # the number of accepted drafts will not be reported

    def note(self, request_id: str, position: int, hidden: mx.array, row: int, count: int) -> None:
        """Store the model's hidden states `hidden[row, :count]` of a sequence's positions from `position` on, for a head."""
        known = self._known[request_id]
        if known.reads:
            self._note(known, position, hidden, row, count)
            known.forget()

    def read_prompt(self, request_id: str, position: int, hidden: mx.array, row: int, count: int) -> None:
        """Note the states of a prompt's chunk for a head, which reads it. A draft model reads as many tokens as the chunk has,
        if drafts are asked for."""
        known = self._known[request_id]
        if not known.reads or not (self._head is not None or self._asked):
            return
        if self._head is not None:
            self._note(known, position, hidden, row, count)
            self._read(known, min(len(known.tokens) - known.held, known.pending))
        else:
            self._read(known, min(count, len(known.tokens) - 1 - known.held))

    def save(self, op: SavePrefixOp) -> None:
        """Keep a head's KV of a cached prefix of its prompt, which ends with a KV block, unless positions are missing."""
        held = self._part(op.request_id, op.length)
        if held is not None and held.kv.length == op.length - 1:
            self._prefixes[op.key] = kept = HeadPrefix(held.kv.copied(), mx.contiguous(held.ends))
            dispatch(kept.kv.arrays, kept.ends)

    def evict(self, key: str) -> None:
        """Drop what is kept of a cached prefix, if anything."""
        self._prefixes.pop(key, None)

    def draft(self, plan: StepPlan, sampled: Mapping[str, Sequence[int]], count: int, kv: Any) -> Drafted | None:
        """Draft `count` tokens for each sequence in `sampled`: request id -> tokens sampled in this step. None if none of them
        is read so far. `kv`: the model's own store, of the plan's micro-batch."""
        rows = {row.request_id: row for row in plan.spec_decode_plan.rows} if plan.spec_decode_plan else {}
        store, self._room = self._stores[plan.micro_batch], CHUNK
        for request_id, tokens in sampled.items():
            known = self._known[request_id]
            taken = accepted(rows[request_id].tokens, tokens) if request_id in rows else 0
            taken -= bool(taken) and tokens[taken] < 0  # as `Speculation.accept`: an error is sampled again
            if self._head is None:
                known.held += min(known.tried, taken)
            known.tried = 0
            known.tokens += [max(token, 0) for token in tokens[: taken + 1]]
        if isinstance(self._head, DFlashHead):
            return self._guess_blocks(self._head, sampled, count, kv)
        ready = {request_id for request_id in sampled if self._catch_up(request_id, store)}
        for request_id in store.ids:
            if request_id not in ready:
                self._set_apart(request_id, store)
        return self._guess(store, count) if ready else None

    # ---- inside

    def _note(self, known: _Known, position: int, hidden: mx.array, row: int, count: int) -> None:
        """Store states for a head, and of each KV block that ends there one more. Those of rejected drafts are replaced."""
        assert self._head is not None
        hidden = hidden[..., -self._head.width :]
        known.note(position, hidden, row, count)
        blocks = position // BLOCK_SIZE
        if (first := (blocks + 1) * BLOCK_SIZE - 1 - position) >= count:
            return
        before = [] if known.ends is None or not blocks else [known.ends[:, :blocks]]
        if sum(one.shape[1] for one in before) == blocks:
            ends = hidden[row : row + 1, first:count:BLOCK_SIZE]
            known.ends = mx.contiguous(mx.concatenate([*before, ends], axis=1))
            dispatch(known.ends)

    def _stored(self, key: str) -> Prefix | None:
        """Return a head's part of a cached prefix or a sequence, as far as it was read, for the disk."""
        held = self._prefixes.get(key) or self._part(key)
        return held.stored() if held is not None else None

    def _fetched(self, key: str, prefix: Prefix) -> None:
        assert self._head is not None
        self._prefixes[key] = HeadPrefix.revived(prefix, self._head.width)

    def _part(self, request_id: str, most: int | None = None) -> HeadPrefix | None:
        """Return the head's part of a sequence up to the end of a KV block, `most` tokens at most; None if positions are
        missing."""
        known = self._known.get(request_id)
        if known is None or known.ends is None or known.skipped > 1:
            return None
        blocks = min(known.held, most or known.held) // BLOCK_SIZE
        caches = known.caches or next((store.extract(request_id) for store in self._stores if request_id in store), None)
        if not caches or not 0 < blocks <= known.ends.shape[1] or not trimmable(caches):
            return None
        return HeadPrefix(Prefix.of(caches, blocks * BLOCK_SIZE - 1), known.ends[:, :blocks])

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
        if known.held > len(known.tokens):
            known.held = len(known.tokens)
            known.states.clear()

    def _set_apart(self, request_id: str, store: KVStore) -> None:
        """Move a sequence's KV out of its row, without drafts."""
        known = self._known[request_id]
        store.cut(request_id, known.row_length)
        known.caches, known.tried = store.extract(request_id), 0
        store.leave(request_id)

    def _catch_up(self, request_id: str, store: KVStore) -> bool:
        """Feed a sequence's tokens until one batched step can process the rest. Return False if it is not read so far, gets no
        drafts, or a head lacks its states."""
        known = self._known[request_id]
        if not known.reads or (self._head is not None and known.pending < max(len(known.tokens) - known.held, 1)):
            return False
        if request_id in store:
            if len(known.tokens) - known.held <= 1 + self._drafts:
                store.cut(request_id, known.row_length)
                return True
            self._set_apart(request_id, store)
        lacks = len(known.tokens) - 1 - known.held
        self._read(known, count := min(lacks, self._room))
        self._room -= count
        if count < lacks or known.row_length < 1:
            return False
        assert known.caches is not None
        store.join(request_id, known.caches, known.row_length)
        known.caches = None
        return True

    def _read(self, known: _Known, count: int) -> None:
        """Feed the next `count` tokens of a sequence."""
        known.caches = caches = known.caches or self.stage.make_caches()
        reserve(caches, len(known.tokens) - known.held)
        while count > 0:
            chunk = known.tokens[known.held : known.held + min(count, CHUNK)]
            states = self._head.states(known.read(len(chunk))) if self._head is not None else None
            self._forward(mx.array([chunk], dtype=mx.int32), caches, states)
            known.held, count = known.held + len(chunk), count - len(chunk)
            dispatch([cache.state for cache in caches])

    def _guess(self, store: KVStore, count: int) -> Drafted:
        ids = store.ids
        fed = [self._known[one].tokens[self._known[one].held :] for one in ids]
        width = max(map(len, fed))
        tokens = mx.array([row + [0] * (width - len(row)) for row in fed], dtype=mx.int32)
        states = None
        if self._head is not None:
            rows = [self._known[one].read(len(row)) for one, row in zip(ids, fed, strict=True)]
            rows = [mx.pad(row, [(0, 0), (0, width - row.shape[1]), (0, 0)]) if row.shape[1] < width else row for row in rows]
            states = self._head.states(mx.concatenate(rows) if len(rows) > 1 else rows[0])
        hidden = self._forward(tokens, store.batch([len(row) for row in fed]), states)
        last = mx.array([len(row) - 1 for row in fed], dtype=mx.int32)[:, None, None]
        hidden = mx.take_along_axis(hidden, last, axis=1)
        for one in ids:
            known = self._known[one]
            known.held, known.tried = len(known.tokens), count - 1
        guesses = [self._likeliest(hidden)]
        while len(guesses) < count:
            dispatch(guesses[-1])
            hidden = self._forward(guesses[-1][:, None], store.batch(), hidden)
            guesses.append(self._likeliest(hidden))
        return Drafted(ids, mx.stack(guesses, axis=1))

    def _guess_blocks(self, head: DFlashHead, ids: Iterable[str], count: int, kv: Any) -> Drafted | None:
        """Guess a block of tokens for each sequence whose states are known, one after another."""
        found: dict[str, mx.array] = {}
        for one in ids:
            known = self._known[one]
            lacks = len(known.tokens) - known.held
            if not known.reads or not 0 < lacks <= known.pending:
                continue
            caches: list[Any] = known.caches or head.make_caches()
            known.caches = caches
            for cache in caches:
                cache.trim(max(int(cache.offset) - known.row_length, 0))
            read = caches or kv.last_kv(one, len(known.tokens) - 1)
            found[one] = head.block(known.tokens[-1], head.states(known.read(lacks)), read, count)
            known.held = len(known.tokens)
        return Drafted(list(found), mx.concatenate(list(found.values()))) if found else None

    def _forward(self, tokens: mx.array, caches: list[Cache], states: mx.array | None) -> mx.array:
        # Ids beyond the draft model's vocabulary only pad the target's, and stand for no text.
        tokens = mx.minimum(tokens, self.stage.vocab_size - 1)
        if isinstance(self.stage, MTPHead | Eagle3Head):
            assert states is not None
            return self.stage.join(tokens, states, caches)
        return self.stage.forward(tokens, caches)

    def _likeliest(self, hidden: mx.array) -> mx.array:
        """Return int32 [rows]: the most likely tokens, from hidden states [rows, 1, H]."""
        found = mx.argmax(self.stage.head(hidden)[:, -1, : self._vocab], axis=-1).astype(mx.int32)
        return self._head.tokens(found) if self._head is not None else found
