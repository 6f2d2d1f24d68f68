"""Cached prefix as arrays: keys and values by position, and checkpoints of all other caches.

A checkpoint holds what caches without an entry for each position have at one position: recurrent and convolution states
whole, the last positions of a window or chunk. Its numbers depend on that position alone, so its arrays suffice to restore it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import ArraysCache, CacheList, ChunkedKVCache, KVCache, RotatingKVCache

from tandem.loading.quantized_kv import Cache, GroupedKVCache

BY_POSITION = (KVCache, GroupedKVCache)
"""Cache classes that hold only keys and values by position."""
LAST_POSITIONS = (RotatingKVCache, ChunkedKVCache)
"""Cache classes that hold keys and values of the last positions."""
STORABLE = (*BY_POSITION, *LAST_POSITIONS, ArraysCache)
"""Cache classes whose arrays can be written to disk."""


def last_positions(cache: Any) -> int:
    """Return the most positions that a checkpoint of a cache has, if it has only the last ones; 0 for another kind of cache."""
    return int(getattr(cache, {RotatingKVCache: "max_size", ChunkedKVCache: "chunk_size"}.get(type(cache), ""), 0))


def members(caches: Iterable[Any]) -> list[Any]:
    """Return the caches, with the members of each CacheList in its place."""
    return [one for cache in caches for one in (members(cache.caches) if isinstance(cache, CacheList) else [cache])]


def trimmable(caches: Sequence[Cache]) -> bool:
    """Return True if caches of these classes can be trimmed to any length."""
    return all(type(one) in BY_POSITION for one in members(caches))


@dataclass
class Prefix:
    """First `length` positions of a sequence in the caches of a rank."""

    length: int
    kinds: list[Any]
    """Class of each cache; a list of classes for a CacheList."""
    states: list[Any]
    """State of each member by position; None for the others."""
    checkpoints: dict[int, list[Any]] = field(default_factory=dict)
    """By position: state of each member that is not by position; None for the others."""

    @classmethod
    def of(cls, caches: Sequence[Cache], length: int) -> Prefix:
        """Return the first `length` positions of these caches, as views of their arrays. If caches cannot be trimmed, they hold
        exactly these positions."""
        flat = members(caches)
        states = [cut_state(one.state, length) if type(one) in BY_POSITION else None for one in flat]
        return cls(
            length, kinds_of(caches), states, {length: [None if type(one) in BY_POSITION else _at_end(one) for one in flat]}
        )

    def copied(self) -> Prefix:
        """Return a copy, which later writes into the caches leave alone."""
        copies: tuple[list[Any], dict[int, list[Any]]] = each_array(mx.contiguous, (self.states, self.checkpoints))
        return Prefix(self.length, self.kinds, *copies)

    def revived(self, length: int) -> list[Cache]:
        """Return new caches with the first `length` positions. Raises KeyError for a length without a checkpoint, if caches
        cannot be trimmed."""
        others = self.checkpoints[length] if any(state is None for state in self.states) else self.states
        states = [other if state is None else cut_state(state, length) for state, other in zip(self.states, others, strict=True)]
        # Caches write into their arrays in place, so each gets new array objects over the shared buffers. MLX copies those on
        # the first write.
        return _nested(self.kinds, iter(each_array(lambda array: array[...], states)))

    @property
    def arrays(self) -> list[mx.array]:
        """All arrays."""
        return [part for _, part in tree_flatten((self.states, list(self.checkpoints.values()))) if isinstance(part, mx.array)]


def kinds_of(caches: Iterable[Cache]) -> list[Any]:
    """Return the class of each cache; a list of classes for a CacheList."""
    return [kinds_of(one.caches) if isinstance(one, CacheList) else type(one) for one in caches]


def _nested(kinds: Iterable[Any], states: Iterator[Any]) -> list[Cache]:
    """Return caches of these classes, whose members have these states."""
    return [CacheList(*_nested(kind, states)) if isinstance(kind, list) else kind.from_state(next(states)) for kind in kinds]


def _at_end(cache: Any) -> Any:
    """Return the state of a cache: of a window or chunk the positions that later ones can read, in order."""
    if type(cache) not in LAST_POSITIONS or cache.keys is None:
        return cache.state
    if type(cache) is ChunkedKVCache:
        sides, first = cache.keys_and_values(), 0
    else:
        sides, first = [cache._temporal_order(side) for side in (cache.keys, cache.values)], cache.keep
    beyond = max(sides[0].shape[2] - last_positions(cache), 0)
    parts = [mx.concatenate([side[..., :first, :], side[..., first + beyond :, :]], axis=2) if beyond else side for side in sides]
    return with_arrays(cache, parts, cache.offset)


def with_arrays(cache: Any, arrays: Sequence[mx.array], length: int) -> Any:
    """Return the state of a cache like `cache` at `length` positions with these arrays of a checkpoint."""
    if type(cache) is RotatingKVCache:
        return *arrays, length, cache.keep, cache.max_size, arrays[0].shape[2]
    if type(cache) is ChunkedKVCache:
        return *arrays, length, cache.chunk_size, length - arrays[0].shape[2]
    return list(arrays), None, None


def cut_state(state: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Return a cache state (keys, values, offset, quantisation if any) cut to `length` positions. Arrays are [1, H,
    positions, D] each, or quantised parts of such."""
    keys, values, _, *groups = state
    keys, values = each_array(lambda part: part[..., :length, :], (keys, values))
    return keys, values, length, *groups


def each_array(function: Callable[[mx.array], mx.array], state: Any) -> Any:
    """Return a copy of a tree with `function` applied to each array."""
    return tree_map(lambda part: function(part) if isinstance(part, mx.array) else part, state)
