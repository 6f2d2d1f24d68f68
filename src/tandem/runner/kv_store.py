"""KV of one micro-batch's decoding sequences: rows join after prefill, grow by a token per step, and leave.

A sequence joins as the last row; when one leaves, the last row takes its place. Such a move waits for the device, so a row that
leaves may stay idle until another joins there: it is computed, and its result is dropped. The row order depends only on joins
and leaves. So all ranks, which see the same plans, have the same order without communication. `rows` is that order; decode
batches use it.

Attention layers (full or sliding window) use KV buffers (kv_buffer.py). Other kinds of cache use mlx-lm's own batch classes
(kv_layers.py). Rationale: docs/adr/0002-kv-store.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from tandem.errors import BatchDesync, UnsupportedModel
from tandem.kv.budget import kv_shape
from tandem.loading.prefix import members
from tandem.loading.quantized_kv import Cache, GroupedKVCache
from tandem.loading.stage import Apart
from tandem.protocol.step import KVShape
from tandem.runner.kv_buffer import Attention, KVBufferLayer
from tandem.runner.kv_layers import LayerStore, ListLayer, MergedLayer, RowStep, StateLayer, batchable

_DROPPING = (KVCache, GroupedKVCache, RotatingKVCache, ChunkedKVCache)
"""Classes of single-sequence caches that can drop the last positions of a call of several tokens."""
IDLE = 8
"""Rows for which one may be idle."""


class Rows:
    """Request ids in row order, with rows and lengths. Stores update them as rows join, move and leave."""

    def __init__(self, drafts: int = 0) -> None:
        """Create an empty table. `drafts`: maximum drafts per sequence and step."""
        self._drafts = drafts
        self._ids: list[str] = []
        """Request id of each row; empty for an idle one."""
        self.idles = False
        """True if rows may be idle; set equally on all ranks, and only if `may_idle` holds for all caches of the model."""
        self._rows: dict[str, int] = {}
        self._lengths: list[int] = []

    @property
    def ids(self) -> list[str]:
        """Request ids in row order. Returns a copy."""
        return list(filter(None, self._ids))

    @property
    def rows(self) -> list[str]:
        """Request id of each row of the decode batch, empty for an idle row. Returns a copy."""
        return list(self._ids)

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._rows

    def length(self, request_id: str) -> int:
        """Return the tokens whose KV the sequence's row holds, including the step last started by `batch`. Raises KeyError if
        unknown."""
        return self._lengths[self._rows[request_id]]

    def cut(self, request_id: str, length: int) -> int:
        """Trim a row to its first `length` tokens, dropping rejected drafts of the last steps; return the number dropped.

        Raises KeyError if unknown; ValueError if `length` exceeds the row, or trims more than `drafts`.
        """
        row = self._rows[request_id]
        if not max(self._lengths[row] - self._drafts, 1) <= length <= self._lengths[row]:
            raise ValueError(f"a row of {self._lengths[row]} tokens with at most {self._drafts} drafts cannot be cut to {length}")
        dropped, self._lengths[row] = self._lengths[row] - length, length
        return dropped

    def _add(self, request_id: str, length: int) -> int:
        """Take the first idle row, or append one; return its number. Raises ValueError for a known id or an empty row."""
        if request_id in self._rows or length < 1:
            raise ValueError(f"sequence {request_id} is in the KV store already, or joins before its prefill")
        row = self._ids.index("") if len(self._rows) < len(self._ids) else len(self._ids)
        self._rows[request_id] = row
        self._ids[row : row + 1], self._lengths[row : row + 1] = [request_id], [length]
        return row

    def _drop(self, request_id: str) -> tuple[int, dict[int, int]]:
        """Remove a row, and `_pack` if too many are idle. Raises KeyError if unknown."""
        row = self._rows.pop(request_id)
        self._ids[row], self._lengths[row] = "", 0
        return self._pack(len(self._rows) // IDLE if self.idles else 0)

    def _pack(self, idle: int = 0) -> tuple[int, dict[int, int]]:
        """Drop idle rows at the end. If more than `idle` remain, the last rows take their places. Return the number of rows
        kept, and by row the one that moves there."""
        live = len(self._rows)
        while self._ids and not self._ids[-1]:
            del self._ids[-1], self._lengths[-1]
        moves: dict[int, int] = {}
        if len(self._ids) - live > idle:
            free = [i for i, one in enumerate(self._ids[:live]) if not one]
            moves = dict(zip(free, (i for i in reversed(range(live, len(self._ids))) if self._ids[i]), strict=True))
            for to, moved in moves.items():
                self._ids[to], self._lengths[to], self._rows[self._ids[moved]] = self._ids[moved], self._lengths[moved], to
            del self._ids[live:], self._lengths[live:]
        return len(self._ids), moves


class KVStore(Rows):
    """KV of the decoding sequences of one micro-batch, for the layers of one stage. Not thread-safe: used by the thread that
    owns MLX."""

    def __init__(
        self,
        make_caches: Callable[[], list[Cache]],
        drafts: int = 0,
        attention: Attention | None = None,
        *,
        over_steps: bool = False,
    ) -> None:
        """Create an empty store. `make_caches` returns new single-sequence mlx-lm caches, one per layer
        (StageModel.make_caches). `drafts`: maximum drafts per sequence and step; `attention`: for the KV buffers.
        `over_steps`: True if `cut` may drop tokens of several steps.

        Raises UnsupportedModel if a layer's cache class cannot be batched, or not trimmed although there are drafts.
        """
        super().__init__(drafts)
        self._layers: list[LayerStore] = [
            _layer_store(cache, drafts, attention, 1 + drafts * over_steps) for cache in make_caches()
        ]
        self._shape = KVShape()
        self._allotted: KVShape | None = None

    def allot(self, shape: KVShape) -> None:
        """Set the capacity: applied at once if smaller, else when a join or step needs it.

        Without a call the store chooses its capacity. Raises BatchDesync if the rows do not fit.
        """
        self._allotted = shape
        if shape.rows < len(self._ids):
            self._settle(*self._pack())
        if shape.size < self._shape.size:
            self._resize(shape)

    def _hold(self, rows: int, longest: int) -> None:
        if not self._shape.holds(rows, longest):
            self._resize(self._allotted or kv_shape(self._shape, rows, longest), rows, longest)

    def _resize(self, shape: KVShape, rows: int = 0, longest: int = 0) -> None:
        rows, longest = max(rows, len(self._ids)), max(longest, *self._lengths, 0)
        if not shape.holds(rows, longest):
            raise BatchDesync(
                f"BATCH DESYNC DETECTED: a KV buffer of {shape.rows} rows of {shape.positions} positions "
                f"is to hold {rows} of {longest}"
            )
        self._shape = shape
        for layer in self._layers:
            layer.resize(shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all layers, idle capacity included."""
        return sum(layer.nbytes for layer in self._layers)

    def join(self, request_id: str, caches: Sequence[Cache], length: int | None = None) -> None:
        """Append a row, copied from a sequence's caches of `length` tokens, at least one. None: read the length from the
        caches, if they hold no recurrent states.

        The caches are only read; drop them afterwards. Raises ValueError for a known id, a wrong number of caches or empty
        caches.
        """
        length = next((one.offset for one in caches if hasattr(one, "offset")), 0) if length is None else length
        if len(caches) != len(self._layers) or any(getattr(cache, "offset", length) != length for cache in caches):
            raise ValueError(
                f"sequence {request_id} of {length} tokens has {len(caches)} caches for "
                f"{len(self._layers)} layers, or such as hold another number of tokens"
            )
        self.join_rows([request_id], caches, [length])

    def join_rows(self, ids: Sequence[str], caches: Sequence[Cache], lengths: Sequence[int]) -> None:
        """Append a row for each of `ids`, copied from the rows of caches of `prompt_rows.rows_of`, like `join`."""
        rows = [self._add(*one) for one in zip(ids, lengths, strict=True)]
        self._hold(len(self._ids), max(self._lengths))
        for layer, cache in zip(self._layers, caches, strict=True):
            layer.join(cache, lengths, rows)

    def leave(self, request_id: str) -> None:
        """Drop a row, which may stay idle; otherwise the last row takes its place. Raises KeyError if unknown."""
        self._settle(*self._drop(request_id))

    def _settle(self, rows: int, moves: dict[int, int]) -> None:
        """Apply the result of `_pack` to the layers."""
        longest = max((self._lengths[to] for to in moves), default=0)
        moved = [layer.copies(list(moves.values()), longest) if moves else () for layer in self._layers]
        mx.eval(moved)  # evaluate before the writes, which are in place only if no other operation reads the buffer
        for layer, copies in zip(self._layers, moved, strict=True):
            layer.settle(rows, moves, copies)
        if not self._ids:
            self._shape = KVShape()
        elif self._allotted is None:
            self._resize(kv_shape(self._shape, len(self._ids), max(self._lengths)))

    def batch(self, counts: Sequence[int] | None = None) -> list[Cache]:
        """Start a decode step over all `rows`. Return one cache per layer, for StageModel.forward on [rows, width].

        `counts`: tokens of each row, one by default; the width is their maximum, and shorter rows are padded. Lengths of rows
        grow by `counts` at once. The forward pass must be built before the next call. Raises ValueError for invalid counts.
        """
        if not self._ids:
            raise ValueError("a decode step over an empty KV store")
        counts = [1] * len(self._ids) if counts is None else counts
        if len(counts) != len(self._ids) or not 1 <= min(counts) <= max(counts) <= 1 + self._drafts:
            raise ValueError(f"{list(counts)} tokens for {len(self._ids)} rows with at most {self._drafts} drafts")
        shortest = min(filter(None, self._lengths))  # an idle row is as long, so that it needs no mask where others need none
        step = RowStep(tuple(length or shortest for length in self._lengths), max(counts))
        self._hold(len(self._ids), step.longest + step.width)
        for layer in self._layers:
            layer.begin(step)
        self._lengths = [length and length + count for length, count in zip(self._lengths, counts, strict=True)]
        return [layer.cache for layer in self._layers]

    def extract(self, request_id: str) -> list[Cache]:
        """Return single-sequence caches with evaluated copies of a row, as `join` takes them. Raises KeyError if unknown."""
        row = self._rows[request_id]
        caches = [layer.extract(row, self._lengths[row]) for layer in self._layers]
        mx.eval([cache.state for cache in caches])  # a lazy slice would make the next write copy the KV buffer
        return caches

    def last_kv(self, request_id: str, length: int) -> dict[str, list[mx.array]]:
        """Return a row's keys and values in the last layer of each kind, in config.json's words: see `KVBufferLayer.read`."""
        last = {layer.kind: layer for layer in self._layers if isinstance(layer, KVBufferLayer)}
        return {kind: layer.read(self._rows[request_id], length) for kind, layer in last.items()}


def may_idle(cache: Cache) -> bool:
    """Return True if a batch of caches of this class may have rows that are computed for nothing, at any length."""
    if isinstance(cache, CacheList):
        return all(map(may_idle, cache.caches))
    return type(cache) in (KVCache, RotatingKVCache, GroupedKVCache, ArraysCache) and batchable(cache)


class RowsApart(Rows):
    """Rows with separate caches, for models that cannot compute sequences of unequal length together.

    Rows join, grow and leave as in `KVStore`. A decode step is one forward pass per row, so a batch is no faster than its
    sequences one by one.
    """

    def __init__(self, make_caches: Callable[[], list[Cache]], drafts: int, reason: str) -> None:
        """Create an empty store. `reason`: why the model needs separate rows. Raises UnsupportedModel if there are drafts, and
        caches that cannot drop them."""
        if drafts and not all(type(one) in _DROPPING for one in members(make_caches())):
            raise UnsupportedModel(
                f"the model decodes its sequences one by one, as {reason}: serve it without speculative decoding",
                param="speculative_method",
            )
        super().__init__(drafts)
        self._caches: list[list[Cache]] = []
        self._layers = len(make_caches())

    def allot(self, shape: KVShape) -> None:
        """Do nothing: rows with separate caches have no shared capacity."""

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(int(cache.nbytes) for caches in self._caches for cache in caches)

    def join(self, request_id: str, caches: Sequence[Cache], length: int) -> None:
        """Append a row, like `KVStore.join`, but keep the caches themselves."""
        if len(caches) != self._layers:
            raise ValueError(f"sequence {request_id} has {len(caches)} caches for {self._layers} layers")
        self._add(request_id, length)
        self._caches.append(list(caches))

    def leave(self, request_id: str) -> None:
        """Drop a row; the last row takes its place. Raises KeyError if unknown."""
        rows, moves = self._drop(request_id)
        for row, moved in moves.items():
            self._caches[row] = self._caches[moved]
        del self._caches[rows:]

    def batch(self, counts: Sequence[int] | None = None) -> Apart:
        """Start a decode step, like `KVStore.batch`; return the rows' caches."""
        counts = [1] * len(self._ids) if counts is None else counts
        if not self._ids or len(counts) != len(self._ids) or not 1 <= min(counts) <= max(counts) <= 1 + self._drafts:
            raise ValueError(f"a decode step of {counts} tokens over {len(self._ids)} rows")
        self._lengths = [length + count for length, count in zip(self._lengths, counts, strict=True)]
        return Apart(self._caches, counts)

    def cut(self, request_id: str, length: int) -> int:
        """Trim a row, with its caches."""
        dropped = super().cut(request_id, length)
        for cache in members(self._caches[self._rows[request_id]] if dropped else ()):
            if type(cache) is RotatingKVCache:  # after a call of several tokens all positions are in order
                cache.keys, cache.values = (part[..., :-dropped, :] for part in (cache.keys, cache.values))
                cache.offset, cache._idx = cache.offset - dropped, cache._idx - dropped
            else:
                cache.trim(dropped)
        return dropped

    def extract(self, request_id: str) -> list[Cache]:
        """Return the row's own caches, evaluated."""
        caches = self._caches[self._rows[request_id]]
        mx.eval([cache.state for cache in caches])
        return caches


def reserve(caches: Sequence[Any], positions: int) -> None:
    """Let the caches of one sequence grow by `positions` positions at once, as each growth copies them. At least by mlx-lm's
    step."""
    for cache in caches:
        if isinstance(cache, CacheList):
            reserve(cache.caches, positions)
        elif type(cache) in (KVCache, GroupedKVCache):
            cache.step = max(positions, KVCache.step)


def make_store(
    make_caches: Callable[[], list[Cache]], drafts: int = 0, one_by_one: str = "", attention: Attention | None = None
) -> KVStore | RowsApart:
    """Return the store for a stage. `one_by_one`: reason for separate rows, empty if not needed. Raises UnsupportedModel."""
    reason = one_by_one or next(
        (f"{type(cache).__name__} has no batch in mlx-lm" for cache in make_caches() if not batchable(cache)), ""
    )
    return RowsApart(make_caches, drafts, reason) if reason else KVStore(make_caches, drafts, attention)


def _layer_store(cache: Any, drafts: int, attention: Attention | None, steps: int) -> LayerStore:
    """Return the store for a layer with single-sequence caches of this class. Exact classes, as subclasses may differ.
    `steps`: number of last steps within which rows can be cut."""
    if type(cache) is KVCache:
        return KVBufferLayer(attention=attention)
    if type(cache) is GroupedKVCache:
        return KVBufferLayer(attention=attention, groups=cache.groups)
    if type(cache) is RotatingKVCache and not cache.keep:
        return KVBufferLayer(window=cache.max_size, drafts=drafts, attention=attention)
    if type(cache) is CacheList:
        return ListLayer([_layer_store(one, drafts, attention, steps) for one in cache.caches])
    if not batchable(cache):
        raise UnsupportedModel(f"the model's cache kind {type(cache).__name__} cannot be decoded in a batch by mlx-lm")
    if drafts and type(cache) is ArraysCache:
        return StateLayer(steps)
    if drafts:
        raise UnsupportedModel(
            f"the model's cache kind {type(cache).__name__} cannot take back drafts that were not "
            "accepted: serve this model without speculative decoding"
        )
    return MergedLayer()
