"""KV of one layer for a batch: a buffer with one row per sequence, written in place.

Keys and values are arrays [rows_cap, kv_heads, len_cap, head_dim]. Each must have exactly one reference, so that MLX donates
it to the next step's write. A second live reference would copy the whole buffer in every step (docs/adr/0002-kv-store.md). So
do not keep results of `update_and_fetch` beyond the forward pass.

With a sliding window the row is a ring: position p is in slot p mod ring. Attention ignores the order of keys, whose rotary
positions are applied, so nothing is moved. The ring has the window's length plus the maximum drafts of a row. Positions
overwritten by drafts are therefore not needed when these are rejected. Trimming does not change the buffer: positions beyond
a row's length are masked, then overwritten.

Quantised keys are three such arrays (codes, scales, biases), as are values; tokens are quantised when written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from tandem.loading.quantized_kv import GroupedKVCache, Groups, Quantized, quantized
from tandem.protocol.step import KVShape
from tandem.runner.kv_layers import RowStep
from tandem.runner.prompt_rows import index

Attention = Callable[[mx.array, mx.array | Quantized, mx.array | Quantized, mx.array, int, float], mx.array | None]
"""Function for attention over rows of unequal length, with the arguments of `ragged_attention.attend`."""
WORTH = 8192
"""Total positions of all rows from which `attention` is faster than MLX's even without a mask."""


class KVBufferLayer:
    """KV rows of one attention layer; also the cache that mlx-lm's model code uses."""

    def __init__(
        self, window: int = 0, drafts: int = 0, attention: Attention | None = None, groups: Groups | None = None
    ) -> None:
        """Create an empty buffer. `window`: positions of a sliding-window layer, 0 for all; `drafts`: maximum drafts per row.
        `attention`: replaces mlx-lm's in steps of one token per row; `groups`: quantisation of a layer without a window, or
        None."""
        self._attention = attention
        self._groups = groups
        self._window = window
        self.kind = "sliding_attention" if window else "full_attention"
        """Kind of the layer, in config.json's words."""
        self._ring = window + drafts if window else 0
        self._steady = mx.cuda.is_available()
        """True on CUDA, where attention with several positions per row reads the whole buffer, masked. Otherwise cuDNN plans
        anew for each length, which takes tens of milliseconds per step."""
        self._parts: list[mx.array] = []
        """Keys and values, or their quantised parts; empty without rows."""
        self._capacity = KVShape()
        self._rows = 0
        self._step: RowStep | None = None
        self._written = True

    # ---- called by the model's layer

    @property
    def offset(self) -> int | mx.array:
        """Rotary position of the current token: int, or int32 [rows]."""
        return self._now().offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Write the step's keys and values [rows, kv_heads, width, head_dim]; return all positions up to the longest.

        Returns views [rows, kv_heads, positions, head_dim] of the buffer, or Quantized ones. Raises RuntimeError outside a
        step.
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
            if not new.size:
                continue  # MLX cannot scatter an index's values of width 0
            if together:
                part[: self._rows, :, start : start + step.width] = new
            else:
                part[step.places(self._ring, part.shape[1])] = new
        views = [part[: self._rows, :, :used] for part in self._parts]
        return (views[0], views[1]) if groups is None else _pair(views, groups)

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> mx.array | str | None:  # parameter names are mlx-lm's
        """Return bool [rows, 1, width, positions], True where a token attends to a position. "causal" if equivalent; None if
        all attend to all."""
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
        """Return attention [rows, heads, 1, head_dim] over the result of `update_and_fetch`; None to use mlx-lm's."""
        step = self._now()
        if self._attention is None or sinks is not None or step.width > 1:
            return None
        worth = step.is_lengths(self._ring, mask) if mask is not None else len(step.lengths) * step.longest >= WORTH
        if not worth:
            return None
        longest = min(step.longest, self._ring - 1) if self._ring else step.longest
        return self._attention(queries, keys, values, step.held(self._ring), longest, scale)

    @property
    def keys(self) -> mx.array:
        """Buffer of the keys. Models let it depend on what they compute beside attention (deepseek_v32's index)."""
        return self._parts[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        self._parts[0] = keys

    @property
    def values(self) -> mx.array:
        """Buffer of the values, which an index without values replaces by zeros."""
        return self._parts[1]

    @values.setter
    def values(self, values: mx.array) -> None:
        self._parts[1] = values

    # ---- called by the store

    @property
    def cache(self) -> KVBufferLayer:
        """Cache that the model's layer receives."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the KV buffer, used or not."""
        return sum(part.nbytes for part in self._parts)

    def join(self, cache: Any, lengths: Sequence[int], rows: Sequence[int]) -> None:
        """Add rows within the capacity: see LayerStore."""
        new = _in_order(cache, self._window) if self._groups is None else _parts_of(cache)
        held = new[0].shape[2]
        count, capacity = self._capacity.rows, self._used(self._capacity.positions)
        at = index(rows) if len(rows) > 1 else slice(rows[0], rows[0] + 1)
        if not self._parts:
            self._parts = [mx.zeros((count, part.shape[1], capacity, part.shape[3]), part.dtype) for part in new]
        self._rows = max(self._rows, rows[-1] + 1)
        start = (max(lengths) - held) % self._ring if self._ring else 0
        ends = min(held, (self._ring or capacity) - start)  # positions before the ring wraps
        for mine, part in zip(self._parts, new, strict=True):
            if not part.size:
                continue  # as in `update_and_fetch`
            mine[at] = 0  # masked weights are 0, but 0 times a NaN left by an earlier row is NaN
            mine[at, :, start : start + ends] = part[:, :, :ends]
            if ends < held:
                mine[at, :, : held - ends] = part[:, :, ends:]

    def copies(self, rows: Sequence[int], length: int) -> Sequence[mx.array]:
        """Return copies of rows. Gathered, since a slice would be a second reference to the buffer."""
        return self._gathered(rows, self._used(length))

    def settle(self, rows: int, moves: Mapping[int, int], copies: Sequence[mx.array]) -> None:
        """Move rows (`copies`, evaluated) and keep the first `rows`: see LayerStore."""
        self._rows = rows
        if not rows:
            self._parts = []
        for i, row in enumerate(moves):
            for part, moved in zip(self._parts, copies, strict=True):
                part[row : row + 1, :, : moved.shape[2]] = moved[i : i + 1]
                part[row : row + 1, :, moved.shape[2] :] = 0  # as in `join`

    def resize(self, capacity: KVShape) -> None:
        """Copy the rows into arrays of this capacity, limited to the ring's positions."""
        self._capacity = capacity
        shape = (capacity.rows, self._used(capacity.positions))
        if self._parts and shape != (self._parts[0].shape[0], self._parts[0].shape[2]):
            self._parts = [_resized(part, self._rows, *shape) for part in self._parts]

    def begin(self, step: RowStep) -> None:
        """Start a step. Raises RuntimeError if the previous step was not written, which would leave holes."""
        if not self._written:
            raise RuntimeError("a decode step began before the forward pass of the last one was built")
        self._step, self._written = step, False

    def extract(self, row: int, length: int) -> KVCache | RotatingKVCache | GroupedKVCache:
        """Return a single-sequence cache with a copy of the row (lazy: evaluate before the next step)."""
        if self._groups is not None:
            keys_then, values_then = _pair(self._gathered([row], length), self._groups)
            grouped = GroupedKVCache(self._groups)
            grouped.state = (keys_then.parts, values_then.parts, length, self._groups.size, self._groups.bits)
            return grouped
        keys, values = self._gathered([row], self._used(length))
        if not self._window:
            plain = KVCache()
            plain.state = (keys, values, length)
            return plain
        held = min(length, self._ring)  # beyond the window too, as drafts may still be rejected
        if length > held:
            order = mx.arange(length - held, length, dtype=mx.int32) % self._ring
            keys, values = (mx.take(part, order, axis=2) for part in (keys, values))
        ring = RotatingKVCache(max_size=self._ring)
        ring.state = (keys, values, length, 0, self._ring, held)
        return ring

    def read(self, row: int, length: int) -> list[mx.array]:
        """Return keys and values [1, kv_heads, positions, head_dim] of a row's first `length` positions, or of its window there,
        in order. Without a copy: drop them before the next step."""
        positions: Any = slice(length)
        if self._window:
            positions = mx.arange(max(length - self._window, 0), length) % self._ring
        parts = [part[row : row + 1, :, positions] for part in self._parts]
        return parts if self._groups is None else [one.expanded() for one in _pair(parts, self._groups)]

    # ---- inside

    def _now(self) -> RowStep:
        if self._step is None:
            raise RuntimeError("no decode step has begun")
        return self._step

    def _span(self, width: int) -> int:
        """Return the positions that attention reads in a step of `width` tokens per row."""
        return self._used(self._capacity.positions if self._reads_all(width) else self._now().longest + width)

    def _reads_all(self, width: int) -> bool:
        return self._steady and width > 1

    def _used(self, length: int) -> int:
        return min(length, self._ring) if self._ring else length

    def _gathered(self, rows: Sequence[int], positions: int) -> Sequence[mx.array]:
        """Return lazy copies [rows, kv_heads, positions, head_dim] of rows. Gathering whole rows is five times as fast."""
        at = mx.array(list(rows), dtype=mx.int32)
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
    """Return the arrays of a single sequence's keys, then of its values, [1, kv_heads, held, ...] each."""
    keys, values, length, *_ = cache.state
    return [part[:, :, :length] for part in (*keys, *values)]


def _in_order(cache: KVCache | RotatingKVCache, window: int) -> tuple[mx.array, mx.array]:
    """Return keys and values [1, kv_heads, held, head_dim] of a single sequence in the order of positions."""
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
