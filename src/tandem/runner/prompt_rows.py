"""Prompts of several sequences in one forward pass: which chunks share one, and how caches become a batch and rows again."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, RotatingKVCache

from tandem.loading.prefix import cut_state, each_array, members
from tandem.loading.quantized_kv import GroupedKVCache
from tandem.loading.stage import StageModel
from tandem.protocol.step import PrefillOp, padded_width

PADDING = 1.25
"""Maximum ratio of padded to actual positions in a shared forward pass."""
COPIED = 8192
"""Maximum KV positions of a shared pass whose prompts began before it, since joining and dividing their caches copies these."""
_BY_POSITION = (KVCache, GroupedKVCache, RotatingKVCache)


@dataclass(frozen=True)
class PromptRows:
    """How a model's prompts may share forward passes. Equal on all ranks, whatever their layers."""

    pooled: bool
    """Prompts whose KV is discarded."""
    positions: int = 0
    """Maximum positions of a prompt whose KV is kept; 0: each has its own pass. With a sliding window, the window."""
    padded: bool = False
    """Prompts of unequal length, which are padded; recurrent states must not see padding."""

    @classmethod
    def of(cls, stage: StageModel) -> PromptRows:
        """Return what the caches of all stages allow."""
        if stage.one_by_one:
            return cls(pooled=False)
        kinds = members(stage.caches_of_all_stages())
        if any(type(one) not in (*_BY_POSITION, ArraysCache) or getattr(one, "keep", 0) for one in kinds):
            return cls(pooled=True)
        window = min((one.max_size for one in kinds if type(one) is RotatingKVCache), default=sys.maxsize)
        return cls(pooled=True, positions=window, padded=all(type(one) in _BY_POSITION for one in kinds))

    def width(self, ops: Sequence[PrefillOp]) -> int:
        """Return the positions of a padded pass over `ops`: the longest chunk, padded to `padded_width` if that can be cut off
        again."""
        longest = max(op.count for op in ops)
        wider = padded_width(longest) if self.padded else longest
        return wider if ops[0].start + wider <= self.positions else longest

    def passes(self, prefill: Sequence[PrefillOp], adapters: Mapping[str, int], *, pads: bool = False) -> list[list[PrefillOp]]:
        """Divide a step's chunks into forward passes. Chunks share one if they begin at the same position, use the same of
        `adapters` by request id, and are of similar length. `pads`: the rows of each are a power of two."""

        def kind(op: PrefillOp) -> tuple[Any, ...]:
            return only_pooled(op), op.pooling or "", op.start, adapters[op.request_id]

        divided: list[list[PrefillOp]] = []
        positions = 0
        for op in sorted(filter(self._shares, prefill), key=lambda op: (*kind(op), op.count)):
            positions += op.count
            row = divided[-1] if divided else []
            if row and kind(row[0]) == kind(op) and self._joins(row, op, positions):
                row.append(op)
            else:
                divided.append([op])
                positions = op.count
        if pads:
            divided = [part for row in divided for part in _in_powers(row)]
        return [[op] for op in prefill if not self._shares(op)] + divided

    def _shares(self, op: PrefillOp) -> bool:
        return self.pooled if only_pooled(op) else op.start + op.count <= self.positions

    def _joins(self, row: Sequence[PrefillOp], op: PrefillOp, positions: int) -> bool:
        """Return True if `op`, not shorter than those in `row`, may be computed with them."""
        rows = len(row) + 1
        padded = op.count == row[0].count or self.padded or only_pooled(op)
        return padded and rows * op.count <= PADDING * positions and (not op.start or rows * (op.start + op.count) <= COPIED)


def _in_powers(row: Sequence[PrefillOp]) -> Iterator[list[PrefillOp]]:
    """Divide a row of chunks into rows of 1, 2, 4 and so on chunks, the longest row first."""
    while row:
        most = 1 << (len(row).bit_length() - 1)
        yield list(row[:most])
        row = row[most:]


def only_pooled(op: PrefillOp) -> bool:
    """Return True for a whole prompt of which only a vector is kept."""
    return op.pooling is not None and op.start == 0 and op.last and op.prompt_logprobs is None


def joined(rows: Sequence[Any]) -> Any:
    """Return a cache of a batch with these single-sequence caches of one layer as rows, all of the same length."""
    if isinstance(rows[0], CacheList):
        return CacheList(*(joined([row.caches[i] for row in rows]) for i in range(len(rows[0].caches))))
    first, *others = (_cut(row, row.offset) if type(row) in _BY_POSITION else row.state for row in rows)
    state = tree_map(lambda part, *parts: mx.concatenate([part, *parts]) if isinstance(part, mx.array) else part, first, *others)
    return type(rows[0]).from_state(state)


def rows_of(caches: Sequence[Any], rows: Sequence[int], lengths: Sequence[int]) -> list[Any]:
    """Return caches with copies (lazy) of these rows of a batch's `caches`, cut to the longest of `lengths`. Shorter rows are
    0 behind their length."""
    at, longest = index(rows), max(lengths)
    filled = (mx.arange(longest) < mx.array(list(lengths))[:, None])[:, None, :, None]

    def copied(cache: Any) -> Any:
        if isinstance(cache, CacheList):
            return CacheList(*map(copied, cache.caches))
        by_position = type(cache) in _BY_POSITION
        padded = by_position and min(lengths) < longest
        copy = (lambda part: mx.where(filled, part[at], 0)) if padded else (lambda part: mx.contiguous(part[at]))
        return type(cache).from_state(each_array(copy, _cut(cache, longest) if by_position else cache.state))

    return list(map(copied, caches))


def index(rows: Sequence[int]) -> slice | mx.array:
    """Return an index of these rows of an array: a slice if they are adjacent."""
    adjacent = range(rows[0], rows[0] + len(rows))
    return slice(adjacent.start, adjacent.stop) if list(rows) == list(adjacent) else mx.array(list(rows))


def _cut(cache: Any, length: int) -> tuple[Any, ...]:
    """Return the state of a cache that never wrapped, cut to `length` positions."""
    state = cut_state(cache.state, length)
    return (*state[:-1], length) if type(cache) is RotatingKVCache else state  # its last number is the next place to write
