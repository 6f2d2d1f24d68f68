"""Caches of single sequences and of batches that the KV store can hold, and their common interface.

mlx-lm's model code uses three members of a cache: `offset` (rotary position of the next token, an int or int32 [rows]),
`make_mask(N, window_size=, return_array=)` and `update_and_fetch(keys, values)`. A `LayerStore` provides such an object for a
whole batch, and adds, removes and extracts rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import mlx.core as mx
from mlx_lm.models import cache as mlx_caches

from tandem.loading.quantized_kv import Cache, GroupedKVCache
from tandem.loading.stage_caches import LayerCall, StateBatch
from tandem.protocol.step import KVShape
from tandem.runner.prompt_rows import rows_of


class RowStep:
    """Positions written by one decode step over all rows. Shared by the layers, so arrays are built once."""

    def __init__(self, lengths: tuple[int, ...], width: int) -> None:
        """Start without arrays. `lengths`: tokens in each row's cache before the step, also the position of the first written
        token; `width`: consecutive tokens written in each row."""
        self.lengths, self.width = lengths, width
        self._places: dict[tuple[int, int], tuple[mx.array, mx.array, mx.array]] = {}
        self._held: dict[int, mx.array] = {}
        self._masks: list[tuple[int, mx.array]] = []

    @cached_property
    def longest(self) -> int:
        """Length of the longest row before the step."""
        return max(self.lengths)

    @cached_property
    def aligned(self) -> bool:
        """True if all rows have equal lengths: no mask, no scatter, and an int as offset."""
        return len(set(self.lengths)) == 1

    @cached_property
    def positions(self) -> mx.array:
        """int32 [rows]: `lengths` on the device."""
        return mx.array(self.lengths, dtype=mx.int32)

    @property
    def offset(self) -> int | mx.array:
        """Rotary offset: an int if rows are aligned, else int32 [rows]."""
        return self.lengths[0] if self.aligned else self.positions

    @cached_property
    def queries(self) -> mx.array:
        """int32 [rows, width]: positions of the written tokens."""
        return self.positions[:, None] + mx.arange(self.width, dtype=mx.int32)

    def places(self, ring: int, heads: int) -> tuple[mx.array, mx.array, mx.array]:
        """Return indices (row, head, slot), each [rows, heads, width], at which tokens are written. `ring`: positions of a
        ring buffer, 0 for none."""
        if (ring, heads) not in self._places:
            shape = (len(self.lengths), heads, self.width)
            slots = (self.queries % ring if ring else self.queries).astype(mx.uint32)
            rows, each = (mx.arange(count, dtype=mx.uint32) for count in shape[:2])
            self._places[ring, heads] = (
                mx.broadcast_to(rows[:, None, None], shape),
                mx.broadcast_to(each[None, :, None], shape),
                mx.broadcast_to(slots[:, None], shape),
            )
        return self._places[ring, heads]

    def held(self, ring: int) -> mx.array:
        """Return int32 [rows]: positions that each row of a ring of `ring` positions reads besides the written one."""
        if ring not in self._held:
            self._held[ring] = mx.array([min(one, ring - 1) for one in self.lengths], dtype=mx.int32) if ring else self.positions
        return self._held[ring]

    def says_lengths(self, ring: int, mask: mx.array) -> mx.array:
        """Record that `mask`, of a step of one token per row, encodes only the rows' lengths; return it."""
        self._masks.append((ring, mask))
        return mask

    def is_lengths(self, ring: int, mask: object) -> bool:
        """Return True for a mask recorded by `says_lengths`."""
        return any(ring == size and mask is known for size, known in self._masks)


class LayerStore(Protocol):
    """Interface of the KV rows of one layer."""

    @property
    def cache(self) -> Any:
        """Object that the model's layer receives as its cache."""

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's arrays."""

    def join(self, cache: Any, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """Append `rows`, or replace idle ones, by copies of a cache's rows, which hold tokens of these `lengths`: of a
        single-sequence cache, or of `prompt_rows.rows_of`."""

    def copies(self, rows: Sequence[int], length: int) -> Sequence[mx.array]:
        """Return lazy copies of the rows' data that `settle` needs; the store evaluates them for all layers at once."""

    def settle(self, rows: int, moves: Mapping[int, int], copies: Sequence[mx.array]) -> None:
        """Put `copies` of the rows moves.values() into rows moves.keys(); keep the first `rows` rows."""

    def begin(self, step: RowStep) -> None:
        """Prepare the next forward pass, which writes as `step` describes."""

    def extract(self, row: int, length: int) -> Any:
        """Return a single-sequence cache with a copy of the row, as lazy arrays."""

    def resize(self, capacity: KVShape) -> None:
        """Change the capacity in rows and positions."""


class ListLayer:
    """Rows of a layer with several caches, such as KV and a state: one store for each."""

    def __init__(self, stores: Sequence[LayerStore]) -> None:
        self._stores = stores

    @property
    def cache(self) -> Any:
        """Caches of the members, by index."""
        return _Members(store.cache for store in self._stores)

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(store.nbytes for store in self._stores)

    def join(self, cache: Any, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """Add rows: see LayerStore."""
        for store, one in zip(self._stores, cache.caches, strict=True):
            store.join(one, lengths, rows)

    def copies(self, rows: Sequence[int], length: int) -> Sequence[Any]:
        """Return the lazy copies of rows, one entry per member."""
        return [store.copies(rows, length) for store in self._stores]

    def settle(self, rows: int, moves: Mapping[int, int], copies: Sequence[Any]) -> None:
        """Move rows: see LayerStore."""
        for store, one in zip(self._stores, copies or [()] * len(self._stores), strict=True):
            store.settle(rows, moves, one)

    def begin(self, step: RowStep) -> None:
        """Start a step in all members."""
        for store in self._stores:
            store.begin(step)

    def extract(self, row: int, length: int) -> Any:
        """Return a copy of one row: see LayerStore."""
        return mlx_caches.CacheList(*(store.extract(row, length) for store in self._stores))

    def resize(self, capacity: KVShape) -> None:
        """Resize all members."""
        for store in self._stores:
            store.resize(capacity)


class _Members(tuple[Any, ...]):
    """Members of an mlx-lm CacheList, by index or all (`caches`)."""

    @property
    def caches(self) -> tuple[Any, ...]:
        return self


class MergedLayer:
    """Rows of a layer that KV buffers do not support, held by mlx-lm's own batch classes.

    Joining and leaving copy the layer's whole batch, as in mlx-lm; for state-space caches that is little.
    """

    def __init__(self) -> None:
        self._batch: Any = None
        self._rows = 0

    @property
    def cache(self) -> Any:
        """mlx-lm's batch cache; None without rows."""
        return self._batch

    @property
    def nbytes(self) -> int:
        """Bytes of the layer's arrays."""
        return 0 if self._batch is None else int(self._batch.nbytes)

    def join(self, cache: Any, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """Add rows: see LayerStore."""
        new = self._merged([cache] if len(rows) == 1 else [rows_of([cache], [i], [n])[0] for i, n in enumerate(lengths)])
        if self._batch is None:
            self._batch = new
        else:
            self._batch.extend(new)
        before, self._rows = self._rows, self._rows + len(rows)
        if rows[0] < before:
            self.settle(max(before, rows[-1] + 1), {row: before + i for i, row in enumerate(rows)}, ())

    def _merged(self, caches: Sequence[Any]) -> Any:
        return type(caches[0]).merge(caches)

    def copies(self, rows: Sequence[int], length: int) -> Sequence[mx.array]:
        """Return nothing, as `settle` gathers rows itself."""
        return ()

    def settle(self, rows: int, moves: Mapping[int, int], copies: Sequence[mx.array]) -> None:
        """Move rows: see LayerStore."""
        if rows == self._rows:
            return
        self._rows = rows
        if not rows:
            self._batch = None
        else:
            self._batch.filter(mx.array([moves.get(row, row) for row in range(rows)], dtype=mx.int32))

    def begin(self, step: RowStep) -> None:
        """Do nothing: mlx-lm's batch caches track their own lengths."""

    def extract(self, row: int, length: int) -> Any:
        """Return a copy of one row: see LayerStore."""
        return self._batch.extract(row)

    def resize(self, capacity: KVShape) -> None:
        """Do nothing: mlx-lm's batches have no spare capacity."""


@dataclass
class _NotedStep:
    """Step whose rows of recurrent states can be taken back."""

    width: int
    began: list[tuple[int, int] | None]
    """By row: its number and length when the step began; None for a row that joined later, or that was taken back."""
    call: LayerCall | None = None

    def note(self, call: LayerCall) -> None:
        """Store the layer's call."""
        self.call = call


class StateLayer(MergedLayer):
    """Rows of recurrent states that can be taken back.

    A step of several tokens leaves each row's states after the last of them. Before anything reads the states of a row with
    fewer valid tokens, its layer is called again with those alone, from the states before the step.
    """

    def __init__(self, steps: int = 1) -> None:
        """Create an empty layer. `steps`: number of last steps within which rows can be taken back."""
        super().__init__()
        self._kept = steps
        self._steps: list[_NotedStep] = []

    def join(self, cache: Any, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """Add rows: see LayerStore."""
        for step in self._steps:
            step.began += [None] * len(rows)
        super().join(cache, lengths, rows)

    def _merged(self, caches: Sequence[Any]) -> Any:
        return StateBatch.merge(caches)

    def settle(self, rows: int, moves: Mapping[int, int], copies: Sequence[mx.array]) -> None:
        """Move rows: see LayerStore."""
        for step in self._steps:
            step.began = [step.began[moves.get(row, row)] for row in range(rows)]
        super().settle(rows, moves, copies)

    def begin(self, step: RowStep) -> None:
        """Take rows back to the step's lengths, and note the step unless it is the only one to keep and has one token per row."""
        self._take_back(enumerate(step.lengths))
        del self._steps[: max(len(self._steps) + 1 - self._kept, 0)]
        self._batch.note = None
        if step.width > 1 or self._kept > 1:
            self._steps.append(_NotedStep(step.width, list(enumerate(step.lengths))))
            self._batch.note = self._steps[-1].note

    def extract(self, row: int, length: int) -> Any:
        """Return a copy of one row: see LayerStore."""
        self._take_back([(row, length)])
        return super().extract(row, length)

    def _take_back(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Take rows back to their lengths, given as (row, length). Rows of one step and as many valid tokens share a call."""
        groups: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for row, length in lengths:
            for number, step in reversed(list(enumerate(self._steps))):
                if (began := step.began[row]) is None or length >= began[1] + step.width:
                    break
                if length >= began[1]:
                    groups.setdefault((number, length - began[1]), []).append((row, began[0]))
                    break
        for (number, count), group in groups.items():
            rows, then = zip(*group, strict=True)
            call = self._steps[number].call
            assert call is not None
            states = call.states(then, count)
            if len(rows) < self._rows:
                at, news = mx.array(rows, dtype=mx.int32), states
                states = [state[...] for state in self._batch.cache]
                for state, new in zip(states, news, strict=True):
                    state[at] = new
            self._batch.cache = states
            for step in self._steps:
                step.began = [None if row in rows else one for row, one in enumerate(step.began)]


def batchable(cache: Cache) -> bool:
    """Return True if single caches of this class can be batched, by KV buffers or by mlx-lm."""
    if type(cache) is GroupedKVCache:
        return True
    if isinstance(cache, mlx_caches.CacheList):
        return all(batchable(inner) for inner in cache.caches)
    return hasattr(cache, "merge") and not getattr(cache, "keep", 0)  # mlx-lm's batches ignore `keep`
