"""Index of KV on the ranks: cached prefixes in memory, and blocks on disk. Pure bookkeeping, no arrays.

A cached prefix holds the KV of the first `length` positions of some sequence. It is found again through the hashes of its
blocks, each chained to the one before (as in vLLM's automatic prefix caching), so a prompt that shares only a part
finds that part too where the caches can be cut (`trimmable`). The least recently used cached prefixes go first. The engine
decides; ranks save, restore and evict by plan, so prefix caching is alike on all of them.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tandem.protocol.kv_blocks import BLOCK_SIZE, DISK_BLOCK_SIZE

SPARED = 0.5
"""Share of the budget that admission leaves to prefixes when prompts share their beginnings."""
SHARED = 0.25
"""Average share of a prompt that began an earlier prompt too, from which prefixes are spared."""
SEEN_BLOCKS, FIRST_BLOCKS = 4096, 64
"""Hashes of past prompts' blocks that are remembered, and how many of each prompt."""


@dataclass
class CachedPrefix:
    """KV of the first `length` positions of a sequence, kept on the ranks under `key`."""

    key: str
    length: int
    hashes: tuple[bytes, ...]
    """Hashes of its blocks; for caches that cannot be cut only the last one counts."""
    hits: int = 0
    """Prompts that were served from it, or from cached prefixes that it replaced."""


@dataclass(frozen=True)
class Hit:
    """Restore `length` positions from the cached prefix `key`."""

    key: str
    length: int


class PrefixIndex:
    """Cached prefixes by the prefixes that they can serve, within a budget of KV positions."""

    def __init__(self, budget: int, *, trimmable: bool = True, extra: int = 0) -> None:
        """`budget` in KV positions over all cached prefixes; 0 turns the cache off. `trimmable`: a cached prefix can be cut.
        `extra`: positions that every cached prefix costs besides its length."""
        self._budget = self._room = budget
        self._extra = extra
        self._trimmable = trimmable
        self._cached_prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()
        """Least recently used first."""
        self._reserved: dict[str, CachedPrefix] = {}
        """Cached prefixes that ranks are about to read: they take room, and serve no prompt yet."""
        self._by_hash: dict[bytes, dict[str, None]] = {}
        """Cached prefixes that hold the prefix with this hash, oldest first."""
        self._ends: dict[bytes, str] = {}
        """Cached prefixes by the hash of their last block."""
        self._evicted: list[str] = []
        self._next_key = 0
        self.positions = 0
        """KV positions held by all cached prefixes, or that their states take as much memory as."""
        self.queries = self.hits = self.hit_tokens = 0
        self._seen: dict[bytes, None] = {}
        """First blocks of past prompts, the latest last."""
        self._shared = 0.0
        """Average share of a prompt that began an earlier one too, over the last 20 or so lookups."""

    @property
    def enabled(self) -> bool:
        """False when nothing is ever kept."""
        return self._budget >= BLOCK_SIZE + self._extra

    @property
    def serves(self) -> str:
        """The part of a prompt that can be reused, as text for `/model/info`."""
        if self.enabled:
            return "any length" if self._trimmable else "blocks"
        dear = 0 < self._budget < BLOCK_SIZE + self._extra and self._extra
        return f"off: a cached prefix of its states takes as much memory as {self._extra} tokens" if dear else "off"

    @property
    def budget(self) -> int:
        """KV positions that there is room for."""
        return self._budget if self.enabled else 0

    def widen(self, budget: int) -> None:
        """Another budget, which is no smaller."""
        self._budget = self._room = max(budget, self._budget)

    def lookup(self, tokens: Sequence[int]) -> Hit | None:
        """The longest cached prefix of `tokens` that leaves at least one token to compute."""
        if not self.enabled:
            return None
        self.queries += 1
        best: Hit | None = None
        hashes = block_hashes(tokens[:-1])
        self._remember(hashes[:FIRST_BLOCKS])
        for i, digest in enumerate(hashes):
            keys = self._by_hash.get(digest)
            if keys:
                best = Hit(next(reversed(keys)), (i + 1) * BLOCK_SIZE)
            elif self._trimmable:
                break
        if best is not None:
            self._cached_prefixes.move_to_end(best.key)
            self.hits += 1
            self.hit_tokens += best.length
            self._cached_prefixes[best.key].hits += 1
        return best

    def _remember(self, hashes: Sequence[bytes]) -> None:
        """Update how much of their beginnings prompts share."""
        known = sum(digest in self._seen for digest in hashes)
        self._shared += 0.05 * (known / max(len(hashes), 1) - self._shared)
        for digest in hashes:
            self._seen.pop(digest, None)
            self._seen[digest] = None
        while len(self._seen) > SEEN_BLOCKS:
            del self._seen[next(iter(self._seen))]

    def peek(self, hashes: Sequence[bytes]) -> int:
        """Positions of the longest cached prefix of a prompt with these blocks, which counts as no use of it."""
        return max((i * BLOCK_SIZE for i, digest in enumerate(hashes, 1) if digest in self._by_hash), default=0)

    def save_point(self, prompt_len: int) -> int:
        """After how many computed positions to save a prompt: at its end, or where only the exact length can be
        restored, after its last whole block but for one token, which the next prompt computes."""
        return prompt_len if self._trimmable else (prompt_len - 1) // BLOCK_SIZE * BLOCK_SIZE

    def save(self, tokens: Sequence[int]) -> CachedPrefix | None:
        """Keep the KV of `tokens` (cut to whole blocks). None when that much is kept already, or it does not fit.

        The caller must have the ranks save it, and those cached prefixes that had to go evicted (`take_evicted`).
        """
        length = len(tokens) // BLOCK_SIZE * BLOCK_SIZE
        if not self._fits(length):
            return None
        hashes = block_hashes(tokens[:length])
        if known := self._by_hash.get(hashes[-1]):
            self._cached_prefixes.move_to_end(next(reversed(known)))
            return None
        hits = 0
        for digest in hashes[:-1] if self._trimmable else ():
            if (key := self._ends.get(digest)) is not None:  # the new one serves all that it served
                hits += self._cached_prefixes[key].hits
                self._evict(key)
        self._shrink_to(self._room - length - self._extra)
        cached_prefix = self._make(hashes if self._trimmable else hashes[-1:], length)
        cached_prefix.hits = hits
        self._keep(cached_prefix)
        return cached_prefix

    def _fits(self, length: int) -> bool:
        """Whether a cached prefix of `length` positions fits beside the reserved ones alone."""
        return self.enabled and length >= BLOCK_SIZE and self._reserved_positions + length + self._extra <= self._room

    @property
    def _reserved_positions(self) -> int:
        return sum(cached_prefix.length + self._extra for cached_prefix in self._reserved.values())

    def _shrink_to(self, positions: int) -> None:
        """Evict the least recently used until no more than `positions` are held, or reserved ones alone."""
        while self._cached_prefixes and self.positions > positions:
            self._evict(next(iter(self._cached_prefixes)))

    def _make(self, hashes: Sequence[bytes], length: int) -> CachedPrefix:
        cached_prefix = CachedPrefix(f"p{self._next_key}", length, tuple(hashes))
        self._next_key += 1
        self.positions += length + self._extra
        return cached_prefix

    def _keep(self, cached_prefix: CachedPrefix) -> None:
        self._cached_prefixes[cached_prefix.key] = cached_prefix
        for digest in cached_prefix.hashes:
            self._by_hash.setdefault(digest, {})[cached_prefix.key] = None
        self._ends[cached_prefix.hashes[-1]] = cached_prefix.key

    def kept(self) -> list[CachedPrefix]:
        """Cached prefixes, the most recently used first."""
        return list(reversed(self._cached_prefixes.values()))

    def holding(self, tokens: Sequence[int]) -> str | None:
        """Key of a cached prefix that has all whole blocks of `tokens`."""
        hashes = block_hashes(tokens)
        return next(reversed(self._by_hash[hashes[-1]])) if hashes and hashes[-1] in self._by_hash else None

    def hashes(self, key: str) -> tuple[bytes, ...]:
        """Hashes of the blocks of a cached prefix; none if it has been evicted since."""
        return self._cached_prefixes[key].hashes if key in self._cached_prefixes else ()

    def reserve(self, hashes: Sequence[bytes]) -> str | None:
        """Reserve room for a prefix of these blocks; returns the key that ranks will use, None without room.

        For caches that can be cut. `arrived` or `give_up` follows.
        """
        length = len(hashes) * BLOCK_SIZE
        if not (self._trimmable and self._fits(length)):
            return None
        self._shrink_to(self._room - length - self._extra)
        cached_prefix = self._make(hashes, length)
        self._reserved[cached_prefix.key] = cached_prefix
        return cached_prefix.key

    def arrived(self, key: str) -> None:
        """All ranks have a reserved prefix: it serves from now on."""
        if (cached_prefix := self._reserved.pop(key, None)) is not None:
            self._keep(cached_prefix)

    def give_up(self, key: str) -> None:
        """A reserved prefix does not come; ranks must drop what they have of it."""
        if (cached_prefix := self._reserved.pop(key, None)) is not None:
            self.positions -= cached_prefix.length + self._extra
            self._evicted.append(key)

    def _evict(self, key: str) -> None:
        cached_prefix = self._cached_prefixes.pop(key)
        self.positions -= cached_prefix.length + self._extra
        if self._ends.get(cached_prefix.hashes[-1]) == key:
            del self._ends[cached_prefix.hashes[-1]]
        for digest in cached_prefix.hashes:
            del self._by_hash[digest][key]
            if not self._by_hash[digest]:
                del self._by_hash[digest]
        self._evicted.append(key)

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Evict every prefix that contains one of these blocks: any of them may be damaged."""
        for key in dict.fromkeys(key for digest in hashes for key in self._by_hash.get(digest, ())):
            self._evict(key)

    def shrink(self, positions: int) -> None:
        """Evict the least recently used until `positions` positions are free again; nothing if that is not above 0."""
        self._shrink_to(self.positions - max(positions, 0))

    @property
    def spared(self) -> int:
        """Positions that admission leaves to prefixes: reserved ones, and a share of the budget if prompts share their
        beginnings. Without it sequences that wait would evict what saves them most of their prompts."""
        return max(self._reserved_positions, int(SPARED * self.budget) if self._shared >= SHARED else 0)

    def limit(self, positions: int) -> None:
        """Hold at most `positions` until the next call; evict the least recently used beyond that."""
        self._room = min(self._budget, positions)
        self._shrink_to(self._room)

    @property
    def leaving(self) -> bool:
        """True while ranks have not been told of some evictions."""
        return bool(self._evicted)

    def take_evicted(self) -> list[str]:
        """Keys that ranks must drop, since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> None:
        """Forget everything: the ranks that held it are gone."""
        self._cached_prefixes.clear()
        self._reserved.clear()
        self._by_hash.clear()
        self._evicted.clear()
        self._ends.clear()
        self.positions = 0


def block_hashes(tokens: Sequence[int]) -> list[bytes]:
    """16-byte hashes of the whole blocks of `tokens`; each covers all tokens before it too."""
    hashes: list[bytes] = []
    digest = b""
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = ",".join(map(str, tokens[start : start + BLOCK_SIZE])).encode()
        digest = hashlib.blake2b(digest + block, digest_size=16).digest()
        hashes.append(digest)
    return hashes


def disk_block_names(hashes: Sequence[bytes]) -> list[bytes]:
    """Names of the whole disk blocks of a prefix whose `block_hashes` these are."""
    blocks = DISK_BLOCK_SIZE // BLOCK_SIZE
    return list(hashes[blocks - 1 :: blocks])


class DiskBlockIndex:
    """Disk blocks by rank, on its own disk or fetched. A disk block is `in` it when every rank has its part."""

    def __init__(self) -> None:
        self._ranks: list[set[bytes]] = []

    def reset(self, kept: Sequence[Iterable[bytes]]) -> None:
        """Reset to the blocks that each rank has."""
        self._ranks = [set(names) for names in kept]

    def keep(self, rank: int, names: Iterable[bytes]) -> None:
        """Add blocks that a rank has."""
        self._ranks[rank].update(names)

    def see(self, rank: int, names: Iterable[bytes], wanted: Iterable[bytes] | None = None) -> None:
        """Set the blocks that a rank has, or those among `wanted` alone."""
        self._ranks[rank].difference_update(list(self._ranks[rank]) if wanted is None else wanted)
        self.keep(rank, names)

    def lose(self, names: Iterable[bytes]) -> None:
        """Remove blocks that a rank has lost: they are of no use to the others either."""
        gone = set(names)
        for held in self._ranks:
            held -= gone

    def __len__(self) -> int:
        """Number of disk blocks that all ranks have."""
        return len(set.intersection(*self._ranks)) if self._ranks else 0

    def __contains__(self, name: bytes) -> bool:
        return bool(self._ranks) and all(name in held for held in self._ranks)

    def anywhere(self, name: bytes) -> bool:
        """True if some rank has it."""
        return any(name in held for held in self._ranks)

    def leading(self, names: Sequence[bytes]) -> list[bytes]:
        """Return those of `names` before the first that is missing."""
        return list(takewhile(self.__contains__, names))
