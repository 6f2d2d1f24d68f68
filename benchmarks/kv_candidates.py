"""The KV stores that kv_store.py compares: mlx-lm's, Tandem's, and a pool of blocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import mlx.core as mx
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import BatchKVCache, KVCache

from tandem.runner.kv_store import KVStore


@dataclass(frozen=True)
class Shape:
    """One attention layer."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: mx.Dtype

    def sequence(self, length: int) -> KVCache:
        """A prefilled cache of one sequence."""
        cache = KVCache()
        part = mx.random.normal((1, self.kv_heads, length, self.head_dim)).astype(self.dtype)
        cache.state = (part, part + 1, length)
        mx.eval(cache.state)
        return cache

    def token(self, rows: int, heads: int) -> mx.array:
        """Projections [rows, heads, 1, head_dim] of one token a row."""
        return mx.random.normal((rows, heads, 1, self.head_dim)).astype(self.dtype)


class Candidate(Protocol):
    """A store for one layer."""

    def join(self, cache: KVCache) -> None:
        """Add a row."""

    def leave(self, row: int) -> None:
        """Drop a row."""

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """One decode step."""

    def settle(self) -> None:
        """Evaluate everything."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""


class MlxLm:
    """BatchKVCache as mlx-lm's BatchGenerator uses it."""

    def __init__(self, caches: list[KVCache]) -> None:
        self.batch = BatchKVCache.merge(caches)

    def join(self, cache: KVCache) -> None:
        """Add a row."""
        self.batch.extend(BatchKVCache.merge([cache]))

    def leave(self, row: int) -> None:
        """Drop a row."""
        rows = self.batch.offset.shape[0]
        self.batch.filter(mx.array([i for i in range(rows) if i != row]))

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """One decode step."""
        mask = create_attention_mask(queries[:, 0], self.batch)
        keys, values = self.batch.update_and_fetch(keys, values)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def settle(self) -> None:
        """Evaluate everything."""
        mx.eval(self.batch.state)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.batch.nbytes


class KvBuffer:
    """Tandem's KVStore."""

    def __init__(self, caches: list[KVCache]) -> None:
        self.store = KVStore(lambda: [KVCache()])
        self.count = 0
        for cache in caches:
            self.join(cache)

    def join(self, cache: KVCache) -> None:
        """Add a row."""
        self.store.join(str(self.count), [cache])
        self.count += 1

    def leave(self, row: int) -> None:
        """Drop a row."""
        self.store.leave(self.store.ids[row])

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """One decode step."""
        cache = self.store.batch()[0]
        mask = create_attention_mask(queries[:, 0], cache)
        keys, values = cache.update_and_fetch(keys, values)
        return mx.fast.scaled_dot_product_attention(queries, keys, values, scale=scale, mask=mask)

    def settle(self) -> None:
        """Evaluate everything."""
        mx.eval(self.store._layers[0]._parts)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self.store.nbytes


class Pool:
    """Blocks of 64 positions in one array [kv_heads, blocks, 64, head_dim], gathered for attention."""

    BLOCK = 64

    def __init__(self, caches: list[KVCache]) -> None:
        need = sum(cache.offset // self.BLOCK + 1 for cache in caches)
        spare = 4 * (max(cache.offset for cache in caches) // self.BLOCK + 2)  # rounds of leave and join grow the batch
        _, heads, _, dim = caches[0].keys.shape
        self.parts = [mx.zeros((heads, need + spare, self.BLOCK, dim), caches[0].keys.dtype) for _ in range(2)]
        self.free = list(range(need + spare))
        self.tables: list[list[int]] = []
        self.lengths: list[int] = []
        for cache in caches:
            self.join(cache)
            self.settle()

    def join(self, cache: KVCache) -> None:
        """Add a row."""
        blocks = [self.free.pop() for _ in range(cache.offset // self.BLOCK + 1)]
        at = mx.array(blocks)
        for part, new in zip(self.parts, (cache.keys, cache.values), strict=True):
            pad = len(blocks) * self.BLOCK - cache.offset
            new = mx.pad(new[0, :, : cache.offset], [(0, 0), (0, pad), (0, 0)])
            part[:, at] = new.reshape(new.shape[0], len(blocks), self.BLOCK, -1)
        self.tables.append(blocks)
        self.lengths.append(cache.offset)

    def leave(self, row: int) -> None:
        """Drop a row."""
        self.free += self.tables.pop(row)
        self.lengths.pop(row)

    def attend(self, queries: mx.array, keys: mx.array, values: mx.array, scale: float) -> mx.array:
        """One decode step."""
        for table, length in zip(self.tables, self.lengths, strict=True):
            if length // self.BLOCK == len(table):
                table.append(self.free.pop())
        longest = max(map(len, self.tables))
        blocks = mx.array([table[n // self.BLOCK] for table, n in zip(self.tables, self.lengths, strict=True)])
        lengths = mx.array(self.lengths)
        table = mx.array([table + [0] * (longest - len(table)) for table in self.tables])
        mask = (mx.arange(longest * self.BLOCK)[None] <= lengths[:, None])[:, None, None]
        gathered = []
        for part, new in zip(self.parts, (keys, values), strict=True):
            part[:, blocks, lengths % self.BLOCK] = new[:, :, 0].swapaxes(0, 1)
            rows = mx.take(part, table.flatten(), axis=1)
            gathered.append(rows.reshape(part.shape[0], len(self.tables), -1, part.shape[3]).swapaxes(0, 1))
        self.lengths = [n + 1 for n in self.lengths]
        return mx.fast.scaled_dot_product_attention(queries, *gathered, scale=scale, mask=mask)

    def settle(self) -> None:
        """Evaluate everything."""
        mx.eval(self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes in blocks that are taken (the pool itself is as large as its owner makes it)."""
        total = sum(part.nbytes for part in self.parts)
        return total * sum(map(len, self.tables)) // self.parts[0].shape[1]


CANDIDATES: dict[str, Callable[[list[KVCache]], Candidate]] = {"mlx-lm": MlxLm, "row KV buffer": KvBuffer, "pool": Pool}
