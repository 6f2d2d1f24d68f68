"""One layer's KV for a batch: a KV buffer with one row per sequence, written in place.

Keys and values are arrays [rows_cap, kv_heads, len_cap, head_dim]. Each is owned by exactly one name, so that MLX
donates it to the write of the next step; a second live reference would copy the whole KV buffer at every step
(docs/adr/0002-kv-store.md). Hence: nobody keeps what `update_and_fetch` returned beyond the forward pass.

With a sliding window the row is a ring: the token at position p lies in slot p mod ring. Attention does not care for
the order of keys, whose positions are rotated into them, so that nothing is ever rolled. The ring is as long as the
window, and longer by the most drafts that a row may have: what drafts overwrite is not needed again when they are not
accepted. Cutting a row is not the KV buffer's business: what lies beyond a row's length is masked, then overwritten.

Quantised keys are three such arrays (codes, scales, biases), and so are values; tokens are quantised when written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from tandem.loading.quantized_kv import GroupedKVCache, Groups, Quantized, quantized
from tandem.protocol.step import KVShape
from tandem.runner.kv_layers import RowStep

Attention = Callable[[mx.array, mx.array | Quantized, mx.array | Quantized, mx.array, int, float], mx.array | None]
"""Attention over rows of unequal length, with the arguments of `ragged_attention.attend`."""
WORTH = 8192
"""Positions of all rows from which it is also faster than MLX's without a mask."""


class KVBufferLayer:
    """Rows of one attention layer; it is itself the cache that mlx-lm's model code sees."""

    def __init__(
        self, window: int = 0, drafts: int = 0, attention: Attention | None = None, groups: Groups | None = None
    ) -> None:
        """`window`: positions that a sliding-window layer keeps, 0 for all; `drafts`: most drafts in a row;
        `attention` takes the place of mlx-lm's in steps of one token a row; `groups`: how a layer without a window
        quantises, if it does."""
        self._attention = attention
        self._groups = groups
        self._window = window
        self._ring = window + drafts if window else 0
        self._steady = mx.cuda.is_available()
        """True on CUDA, where attention with several positions a row reads the whole KV buffer, masked: cuDNN plans anew
        for each length, tens of milliseconds a step."""
        self._parts: list[mx.array] = []
        """Keys and values, of quantised ones the parts; empty while there are no rows."""
        self._capacity = KVShape()
        self._rows = 0
        self._step: RowStep | None = None
        self._written = True

    # ---- what the model's layer calls

    @property
    def offset(self) -> int | mx.array:
        """Rotary position of the token that is being computed: int, or int32 [rows]."""
        return self._now().offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the step's tokens, keys and values [rows, kv_heads, width, head_dim]; return all up to the longest.

        Returns [rows, kv_heads, positions, head_dim] views of the KV buffer, or Quantized of such. Raises RuntimeError
        outside a step.
        """
        step = self._now()
        if self._written or keys.shape[0] != self._rows or keys.shape[2] != step.width:
            raise RuntimeError(f"decode step of {self._rows} x {step.width} got keys {keys.shape} or a second write")
        self._written = True
        used = self._span(step.width)
        start = step.longest % self._ring if self._ring else step.longest
        together = step.aligned and not (self._ring and start + step.width > self._ring)
        groups = self._groups
        news = (keys, values) if groups is None else (*quantized(keys, groups).parts, *quantized(values, groups).parts)
        for part, new in zip(self._parts, news, strict=True):
            if together:
                part[: self._rows, :, start : start + step.width] = new
            else:
                part[step.places(self._ring, part.shape[1])] = new
        views = [part[: self._rows, :, :used] for part in self._parts]
        return (views[0], views[1]) if groups is None else _pair(views, groups)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:  # the parameters are mlx-lm's
        """Bool [rows, 1, width, positions], true where a position may attend; "causal" where that says it, and None
        when every row may attend to everything."""
        step = self._now()
        span = window_size or self._window
        used = self._span(N)
        wrapped = N == 1 and 0 < self._window == self._ring <= min(step.lengths) + 1
        if (step.aligned or wrapped) and (not span or span >= used) and not self._reads_all(N) and (N == 1 or not return_array):
            return None if N == 1 else "causal"
        age = step.queries[:, :, None] - mx.arange(used, dtype=mx.int32)
        if self._ring:
            age = age % self._ring
        mask = (age >= 0) & (age <= step.queries[:, :, None])
        if span:
            mask = mask & (age < span)
        lengths_alone = N == 1 and (not span or span >= used or span == self._ring)
        return step.says_lengths(self._ring, mask[:, None]) if lengths_alone else mask[:, None]

    def attend(
        self, queries: mx.array, keys: mx.array, values: mx.array, *, scale: float, mask: object, sinks: mx.array | None
    ) -> mx.array | None:
        """Attention [rows, heads, 1, head_dim] over what `update_and_fetch` returned; None: mlx-lm's must do it."""
        step = self._now()
        if self._attention is None or sinks is not None or step.width > 1:
            return None
        worth = step.is_lengths(self._ring, mask) if mask is not None else len(step.lengths) * step.longest >= WORTH
        if not worth:
            return None
        longest = min(step.longest, self._ring - 1) if self._ring else step.longest
        return self._attention(queries, keys, values, step.held(self._ring), longest, scale)

    # ---- what the store calls

    @property
    def cache(self) -> KVBufferLayer:
        """The cache that the model's layer receives."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the KV buffer, used or not."""
        return sum(part.nbytes for part in self._parts)

    def join(self, cache: Any, length: int) -> None:
        """Append a row, for which there is room: copies one sequence, touches no other row."""
        new = _in_order(cache, self._window) if self._groups is None else _parts_of(cache)
        held = new[0].shape[2]
        rows, capacity = self._capacity.rows, self._used(self._capacity.positions)
        if not self._parts:
            self._parts = [mx.zeros((rows, part.shape[1], capacity, part.shape[3]), part.dtype) for part in new]
        row, self._rows = self._rows, self._rows + 1
        start = (length - held) % self._ring if self._ring else 0
        ends = min(held, (self._ring or capacity) - start)  # what fits before the ring wraps
        for mine, part in zip(self._parts, new, strict=True):
            mine[row : row + 1] = 0  # masked positions weigh nothing, but 0 times a NaN that a row left is NaN
            mine[row : row + 1, :, start : start + ends] = part[:, :, :ends]
            if ends < held:
                mine[row : row + 1, :, : held - ends] = part[:, :, ends:]

    def last_row(self, length: int) -> Sequence[mx.array]:
        """Copies of the last row. A gather and not a slice, which would be a second reference to the KV buffer."""
        return self._gathered(self._rows - 1, self._used(length))

    def leave(self, row: int, last: Sequence[mx.array]) -> None:
        """Drop `row`: the last row (evaluated copies) moves into its place."""
        self._rows -= 1
        if not self._rows:
            self._parts = []
        elif row < self._rows:
            for part, moved in zip(self._parts, last, strict=True):
                part[row : row + 1, :, : moved.shape[2]] = moved
                part[row : row + 1, :, moved.shape[2] :] = 0  # as in `join`

    def resize(self, capacity: KVShape) -> None:
        """Copy the rows into arrays of this capacity; of a ring no more positions than it has."""
        self._capacity = capacity
        shape = (capacity.rows, self._used(capacity.positions))
        if self._parts and shape != (self._parts[0].shape[0], self._parts[0].shape[2]):
            self._parts = [_resized(part, self._rows, *shape) for part in self._parts]

    def begin(self, step: RowStep) -> None:
        """Start a step. Raises RuntimeError when the one before was not written: rows would have holes."""
        if not self._written:
            raise RuntimeError("a decode step began before the forward pass of the last one was built")
        self._step, self._written = step, False

    def extract(self, row: int, length: int) -> KVCache | RotatingKVCache | GroupedKVCache:
        """A single sequence's cache with a copy of the row (lazy: evaluate before the next step)."""
        if self._groups is not None:
            keys_then, values_then = _pair(self._gathered(row, length), self._groups)
            grouped = GroupedKVCache(self._groups)
            grouped.state = (keys_then.parts, values_then.parts, length, self._groups.size, self._groups.bits)
            return grouped
        keys, values = self._gathered(row, self._used(length))
        if not self._window:
            plain = KVCache()
            plain.state = (keys, values, length)
            return plain
        held = min(length, self._ring)  # more than the window: drafts may still be taken back
        if length > held:
            order = mx.arange(length - held, length, dtype=mx.int32) % self._ring
            keys, values = (mx.take(part, order, axis=2) for part in (keys, values))
        ring = RotatingKVCache(max_size=self._ring)
        ring.state = (keys, values, length, 0, self._ring, held)
        return ring

    def check(self, lengths: Sequence[int]) -> None:
        """Raise AssertionError unless the KV buffer holds so many rows and has room for them."""
        if self._rows != len(lengths):
            raise AssertionError(f"KV buffer holds {self._rows} rows, not {len(lengths)}")
        if lengths and not self._capacity.holds(self._rows, max(lengths)):
            raise AssertionError(f"KV buffer of {self._capacity} is too small for lengths {lengths}")
        if not lengths and self._parts:
            raise AssertionError("an empty KV buffer holds memory")

    # ---- inside

    def _now(self) -> RowStep:
        if self._step is None:
            raise RuntimeError("no decode step has begun")
        return self._step

    def _span(self, width: int) -> int:
        """Positions that attention reads in a step of `width` tokens a row."""
        return self._used(self._capacity.positions if self._reads_all(width) else self._now().longest + width)

    def _reads_all(self, width: int) -> bool:
        return self._steady and width > 1

    def _used(self, length: int) -> int:
        return min(length, self._ring) if self._ring else length

    def _gathered(self, row: int, positions: int) -> Sequence[mx.array]:
        """Lazy copies [1, kv_heads, positions, head_dim] of one row. Whole rows are gathered five times as fast."""
        at = mx.array([row], dtype=mx.int32)
        return [mx.take(part, at, axis=0)[:, :, :positions] for part in self._parts]


def _resized(old: mx.array, rows: int, rows_cap: int, len_cap: int) -> mx.array:
    new = mx.zeros((rows_cap, old.shape[1], len_cap, old.shape[3]), old.dtype)
    keep = min(old.shape[2], len_cap)
    new[:rows, :, :keep] = old[:rows, :, :keep]
    return new


def _pair(parts: Sequence[mx.array], groups: Groups) -> tuple[Quantized, Quantized]:
    codes, scales, biases, *values = parts
    return Quantized(codes, scales, biases, groups), Quantized(values[0], values[1], values[2], groups)


def _parts_of(cache: GroupedKVCache) -> list[mx.array]:
    """Arrays of a single sequence's keys, then of its values, [1, kv_heads, held, ...] each."""
    keys, values, length, *_ = cache.state
    return [part[:, :, :length] for part in (*keys, *values)]


def _in_order(cache: KVCache | RotatingKVCache, window: int) -> tuple[mx.array, mx.array]:
    """Keys and values [1, kv_heads, held, head_dim] of a single sequence in the order of their positions."""
    if not window:
        keys, values, length = cache.state
        return keys[:, :, :length], values[:, :, :length]
    keys, values, length, _, size, index = cache.state
    held = min(length, size)

    def ordered(part: mx.array) -> mx.array:
        if index < part.shape[2]:
            parts = [part[:, :, index:], part[:, :, :index]]  # the oldest positions first
            part = mx.concatenate(parts, axis=2) if index < length else parts[1]
        return part[:, :, part.shape[2] - held :]

    return ordered(keys), ordered(values)
