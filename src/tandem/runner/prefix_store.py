"""Arrays of the prefix cache: KV and states of past prompts on a rank, saved, restored and evicted by plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map
from mlx_lm.models.cache import CacheList, KVCache

from tandem.comm.group import dispatch
from tandem.errors import BatchDesync
from tandem.kv.store import KVDisk
from tandem.loading.quantized_kv import Cache, GroupedKVCache
from tandem.protocol.kv_blocks import StoreOp


@dataclass(frozen=True)
class _Saved:
    """Saved cache of one layer: its class and mlx-lm state (arrays and numbers), or its members for a CacheList."""

    kind: Any
    state: Any
    members: tuple[_Saved, ...] = ()

    @property
    def arrays(self) -> list[mx.array]:
        """Arrays of the state, including those of members."""
        own = [part for _, part in tree_flatten(self.state) if isinstance(part, mx.array)]
        return own + [array for member in self.members for array in member.arrays]


_BY_POSITION = (KVCache, GroupedKVCache)
"""Cache classes that hold only keys and values by position."""


def trimmable(caches: Sequence[Cache]) -> bool:
    """Return True if caches of these classes can be trimmed to any length."""
    return all(trimmable(one.caches) if isinstance(one, CacheList) else type(one) in _BY_POSITION for one in caches)


class PrefixStore:
    """Cached prefixes by key, as single-sequence caches, one per layer."""

    def __init__(self, disk: KVDisk | None = None) -> None:
        """Create an empty store. `disk`: disk cache that prefixes are written to and fetched from; None without one."""
        self._saved: dict[str, list[_Saved]] = {}
        self._disk = disk
        self.nbytes = 0
        """Bytes of all cached prefixes, kept as a running total since every step reports it."""

    def save(self, key: str, caches: Sequence[Cache], held: int, length: int) -> None:
        """Copy the first `length` of the `held` positions in `caches`. Raises BatchDesync if caches are shorter, or longer
        but not trimmable."""
        if held != length and (held < length or not trimmable(caches)):
            raise BatchDesync(f"a prefix of {length} positions is to be saved, the cache holds {held}")
        saved = [_save(cache, length) for cache in caches]
        dispatch([one.arrays for one in saved])
        self._hold(key, saved)

    def restore(self, key: str, length: int) -> list[Cache]:
        """Return new caches with the first `length` positions of a cached prefix. Raises BatchDesync for an unknown key."""
        if self._disk is not None and self._disk.has(key):
            self._hold(key, [_Saved(type(cache), cache.state) for cache in self._disk.take(key) or []])
        if not self._saved.get(key):
            raise BatchDesync(f"prefix {key} is to be restored, which is not here")
        return [_revive(one, length) for one in self._saved[key]]

    def evict(self, key: str) -> None:
        """Drop a cached or fetched prefix. Raises BatchDesync for an unknown key."""
        if self._disk is not None and self._disk.has(key):
            self._disk.drop(key)
        elif (saved := self._saved.pop(key, None)) is None:
            raise BatchDesync(f"prefix {key} is to be evicted, which is not here")
        else:
            self.nbytes -= _bytes(saved)

    def _hold(self, key: str, saved: list[_Saved]) -> None:
        self._saved[key] = saved
        self.nbytes += _bytes(saved)

    def store(self, op: StoreOp) -> None:
        """Queue disk blocks of a cached prefix for writing. Raises BatchDesync for an unknown key."""
        if self._disk is not None and self._disk.has(op.key):
            return  # fetched from disk, and not restored yet
        if self._disk is None or op.key not in self._saved:
            raise BatchDesync(f"prefix {op.key} is to be stored, which is not here")
        self._disk.store(op, [saved.state for saved in self._saved[op.key]])


def _bytes(saved: Sequence[_Saved]) -> int:
    return sum(array.nbytes for one in saved for array in one.arrays)


def _save(cache: Cache, length: int) -> _Saved:
    """Copy a cache, since later writes change its arrays in place."""
    if isinstance(cache, CacheList):
        return _Saved(CacheList, (), tuple(_save(one, length) for one in cache.caches))
    state = cut_state(cache.state, length) if type(cache) in _BY_POSITION else cache.state
    return _Saved(type(cache), _each_array(mx.contiguous, state))


def cut_state(state: tuple[Any, ...], length: int) -> tuple[Any, ...]:
    """Return a cache state (keys, values, offset, quantisation if any) cut to `length` positions. Arrays are [1, H,
    positions, D] each, or quantised parts of such."""
    keys, values, _, *groups = state
    keys, values = _each_array(lambda part: part[..., :length, :], (keys, values))
    return keys, values, length, *groups


def _revive(saved: _Saved, length: int) -> Any:
    if saved.kind is CacheList:
        return CacheList(*(_revive(one, length) for one in saved.members))
    state = cut_state(saved.state, length) if saved.kind in _BY_POSITION else saved.state
    # Caches write into their arrays in place, so each gets new array objects over the shared buffers. MLX copies those on the
    # first write.
    return saved.kind.from_state(_each_array(lambda array: array[...], state))


def _each_array(function: Callable[[mx.array], mx.array], state: Any) -> Any:
    return tree_map(lambda part: function(part) if isinstance(part, mx.array) else part, state)
