"""Wrappers of caches in a stage's call: masks by kv head, and placeholders for caches of other stages (mlx)."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList

from tandem.loading.quantized_kv import Cache


class GroupedMask:
    """Cache wrapper whose masks [rows, 1, L, positions] get an axis for the queries of a kv head."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def make_mask(self, *args: object, **kwargs: object) -> object:
        """Return the masks of the cache, with the axis where they have four."""
        mask = self._cache.make_mask(*args, **kwargs)
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
