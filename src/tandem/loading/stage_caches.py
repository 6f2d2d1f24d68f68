"""Wrappers of layers and caches in a stage's call: masks by kv head, placeholders for other stages, and recurrent states that
can be taken back (mlx)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, CacheList

from tandem.loading.adapters import Adapters
from tandem.loading.quantized_kv import Cache
from tandem.loading.seams import Placeholder


class NotedLayer(Placeholder):
    """Own layer with recurrent states, which passes its calls to batches of states that note them."""

    def __init__(self, layer: nn.Module, adapters: Adapters | None) -> None:
        super().__init__(layer)
        self._adapters = adapters

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Pass the call to the batch of states among the arguments, if it notes calls; then call the layer."""
        for value in (*args, *kwargs.values()):
            for cache in getattr(value, "caches", (value,)):
                if isinstance(cache, StateBatch) and cache.note is not None:
                    cache.note(LayerCall(self._layer, args, kwargs, cache.state[0], self._adapters))
        return self._layer(*args, **kwargs)


class LayerCall:
    """Call of a layer on rows of several tokens, which can be repeated for fewer of them."""

    def __init__(
        self,
        layer: nn.Module,
        args: tuple[object, ...],
        kwargs: dict[str, object],
        states: Sequence[mx.array],
        adapters: Adapters | None,
    ) -> None:
        """Store a call with these arguments, before it is made. `states`: those of its cache, [rows, ...] each; `adapters`:
        LoRA adapters with those of the rows chosen."""
        self._layer, self._adapters = layer, adapters
        self._args = tree_map(lambda value: copy(value) if hasattr(value, "inv_rms") else value, (args, kwargs))
        self._states, self._chosen = list(states), adapters.chosen if adapters else []
        hidden = next(one for one in (*args, *kwargs.values()) if isinstance(one, mx.array) and one.ndim > 2)
        self._shape = hidden.shape[:2]

    def states(self, rows: Sequence[int], count: int) -> list[mx.array]:
        """Return the states of these rows after their first `count` tokens (lazy). The layer's output is dropped, so MLX computes
        only what the states depend on."""
        at = mx.array(list(rows), dtype=mx.int32)
        batch = ArraysCache(len(self._states))
        batch.cache = [state[at] for state in self._states]

        def part(value: Any) -> Any:
            if isinstance(value, StateBatch):
                return batch
            if hasattr(value, "update_and_fetch"):
                return _Unread()
            if hasattr(value, "inv_rms"):  # Kimi K3's list of earlier outputs, to which layers append
                blocks = copy(value)
                for name, array in vars(value).items():
                    setattr(blocks, name, array[:, at, :count] if isinstance(array, mx.array) else array)
                return blocks
            if not isinstance(value, mx.array):
                return None if isinstance(value, str) else value  # a mask by name
            if value.shape[:2] == self._shape:
                return value[at, :count]
            return None if value.ndim > 2 else value[at] if value.shape == self._shape[:1] else value  # no masks

        if count:
            args, kwargs = tree_map(part, self._args)
            if self._adapters:
                now = self._adapters.chosen
                self._adapters.choose([self._chosen[row] for row in rows])
            self._layer(*args, **kwargs)
            if self._adapters:
                self._adapters.choose(now)
        states: list[mx.array] = batch.cache
        return states


class StateBatch(ArraysCache):
    """Recurrent states of a batch of rows."""

    note: Callable[[LayerCall], None] | None = None
    """Receiver of the calls of their layer, before they are made."""


class _Unread:
    """Keys and values beside states in a repeated call, whose attention is not computed."""

    offset = 0

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        return keys, values


class MaskedCache:
    """Cache wrapper that changes its masks, made with `options`, by `change`."""

    def __init__(self, cache: Any, change: Callable[[Any], Any], **options: object) -> None:
        self._cache, self._change, self._options = cache, change, options

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, *args: object, **kwargs: object) -> Any:
        """Return the changed mask."""
        return self._change(self._cache.make_mask(*args, **{**kwargs, **self._options}))


def grouped(mask: object) -> object:
    """Return a mask [rows, 1, L, positions] with an axis for the queries of a kv head; one with fewer axes as it is."""
    return mask[:, :, None] if isinstance(mask, mx.array) and mask.ndim == 4 else mask


class OtherStageCache:
    """Placeholder for another stage's cache of a kind that this stage lacks; offset and masks are those of an own cache."""

    def __init__(self, made: Any, own: Any) -> None:
        self._made, self.offset = made, own.offset
        if hasattr(own, "make_mask"):
            self.make_mask = own.make_mask

    def __getattr__(self, name: str) -> Any:
        return getattr(self._made, name)


def cache_kind(cache: Cache) -> object:
    """Return a key that is equal for caches of the same class, window and number of states; for a list, keys of its
    members."""
    if isinstance(cache, CacheList):
        return tuple(cache_kind(one) for one in cache.caches)
    sizes = (getattr(cache, name, None) for name in ("max_size", "keep", "chunk_size"))
    return type(cache), len(getattr(cache, "cache", ())), *sizes
