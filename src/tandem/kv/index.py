"""Index of the prefix cache: cached prefixes in memory, and blocks on disk. Pure bookkeeping, no arrays.

A cached prefix holds the KV of the first `length` positions of a sequence. It is found by the hashes of its blocks, each
chained to the previous one (as in vLLM's automatic prefix caching). If caches can be trimmed (`trimmable`), a prompt may
reuse any part of it; else the part up to a checkpoint, a copy of states and windows at the end of a block. The least recently
used prefixes are evicted first. The engine decides; ranks save, restore and evict by plan, so prefix caches are equal on all
ranks.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, takewhile

from tandem.protocol.kv_blocks import BLOCK_SIZE, DISK_BLOCK_SIZE, NAME_BYTES, checkpoint_name, is_checkpoint

SPARED = 0.5
"""Fraction of the budget reserved for prefixes during admission, if prompts share their beginnings."""
SHARED = 0.25
"""Average shared fraction of prompts from which on that reserve applies."""
CHECKPOINTS = 0.25
"""Maximum size of a prefix's checkpoints but its last one, as a fraction of its blocks."""
SEEN_BLOCKS, FIRST_BLOCKS = 4096, 64
"""Maximum block hashes of past prompts to remember, in all and per prompt."""


@dataclass
class CachedPrefix:
    """KV of the first `length` positions of a sequence, stored on the ranks under `key`."""

    key: str
    length: int
    hashes: tuple[bytes, ...]
    """Hashes of its blocks."""
    checkpoints: dict[int, int] = field(default_factory=dict)
    """Positions with a checkpoint, and prompts that reused each; empty if caches can be trimmed."""
    takes: list[tuple[str, int]] = field(default_factory=list)
    """(Key, position) of checkpoints that it takes over from the prefixes that it replaces."""
    drops: list[bytes] = field(default_factory=list)
    """Names of checkpoints that it did not take over."""
    hits: int = 0
    """Prompts that reused it, or prefixes that it replaced."""


@dataclass(frozen=True)
class Hit:
    """Result of a lookup: restore `length` positions from the cached prefix `key`."""

    key: str
    length: int


class PrefixIndex:
    """Cached prefixes within a budget of KV positions, found by their block hashes."""

    def __init__(self, budget: int, *, trimmable: bool = True, extra: int = 0, checkpoint: int = 0, every: int = 0) -> None:
        """Create an empty index. `budget`: KV positions of all cached prefixes; 0 disables the cache. `trimmable`: prefixes
        can be cut to any length. `extra`: positions that each prefix costs beyond its length; `checkpoint`: those that each
        checkpoint costs but the first. `every`: distance of the checkpoints in a long prompt; 0: only where it ends or forks.
        """
        self._budget = self._room = budget
        self._extra = extra
        self._checkpoint = checkpoint
        self._every = every
        self._trimmable = trimmable
        self._cached_prefixes: OrderedDict[str, CachedPrefix] = OrderedDict()
        """Cached prefixes by key, least recently used first."""
        self._reserved: dict[str, CachedPrefix] = {}
        """Prefixes that ranks are about to read. They count against the budget but serve no prompt yet."""
        self._by_hash: dict[bytes, dict[str, None]] = {}
        """Keys of the cached prefixes that can be reused up to the end of the block with this hash, oldest first."""
        self._known: Counter[bytes] = Counter()
        """Number of cached prefixes with this block, if caches cannot be trimmed."""
        self._ends: dict[bytes, str] = {}
        """Keys of cached prefixes by the hash of their last block."""
        self._evicted: list[str] = []
        self._next_key = 0
        self.positions = 0
        """KV positions of all cached prefixes, including `extra`."""
        self.queries = self.hits = self.hit_tokens = 0
        self._seen: dict[bytes, None] = {}
        """Hashes of the first blocks of past prompts, latest last."""
        self._shared = 0.0
        """Average fraction of a prompt shared with an earlier one, over about 20 lookups."""

    @property
    def enabled(self) -> bool:
        """True if the budget has room for at least one cached prefix."""
        return self._budget >= BLOCK_SIZE + self._extra

    @property
    def serves(self) -> str:
        """Granularity of reuse, as text for `/model/info`: `any length`, `blocks`, or `off`."""
        if self.enabled:
            return "any length" if self._trimmable else "blocks"
        dear = 0 < self._budget < BLOCK_SIZE + self._extra and self._extra
        return f"off: a cached prefix of its states takes as much memory as {self._extra} tokens" if dear else "off"

    @property
    def budget(self) -> int:
        """Budget in KV positions; 0 if disabled."""
        return self._budget if self.enabled else 0

    def widen(self, budget: int) -> None:
        """Raise the budget; a smaller one is ignored."""
        self._budget = self._room = max(budget, self._budget)

    def lookup(self, hashes: Iterable[bytes]) -> Hit | None:
        """Return the longest cached prefix of a prompt with these block hashes, which are read as far as they are known; None
        without one. The caller leaves out the block that ends with the prompt, as one token must be computed."""
        if not self.enabled:
            return None
        self.queries += 1
        best: Hit | None = None
        rest = iter(hashes)
        self._remember(first := list(islice(rest, FIRST_BLOCKS)))
        for i, digest in enumerate(chain(first, rest), 1):
            keys = self._by_hash.get(digest)
            if keys:
                best = Hit(next(reversed(keys)), i * BLOCK_SIZE)
            elif digest not in self._known:
                break
        if best is not None:
            self._cached_prefixes.move_to_end(best.key)
            self.hits += 1
            self.hit_tokens += best.length
            cached_prefix = self._cached_prefixes[best.key]
            cached_prefix.hits += 1
            if best.length in cached_prefix.checkpoints:
                cached_prefix.checkpoints[best.length] += 1
        return best

    def _remember(self, hashes: Sequence[bytes]) -> None:
        """Update the average shared fraction with a prompt of these block hashes."""
        known = sum(digest in self._seen for digest in hashes)
        self._shared += 0.05 * (known / max(len(hashes), 1) - self._shared)
        for digest in hashes:
            self._seen.pop(digest, None)
            self._seen[digest] = None
        while len(self._seen) > SEEN_BLOCKS:
            del self._seen[next(iter(self._seen))]

    def peek(self, hashes: Sequence[bytes]) -> int:
        """Return the length in positions of the longest cached prefix of a prompt, without counting it as a use."""
        return max((i * BLOCK_SIZE for i, digest in enumerate(hashes, 1) if digest in self._by_hash), default=0)

    def save_point(self, prompt_len: int) -> int:
        """Return the number of computed positions after which to save a prompt: all. If caches cannot be trimmed, the last end
        of a disk block that leaves one token to compute."""
        return prompt_len if self._trimmable else (prompt_len - 1) // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE

    def save_points(self, length: int, hashes: Iterable[bytes], *, cached: int = 0, on_disk: int = 0) -> list[int]:
        """Return where to save a prompt of `length` tokens whose first `cached` positions are restored, ascending.

        If caches cannot be trimmed, these are also the place where it departs from known prompts, so that a third one finds
        a checkpoint there, and every so many positions. `on_disk`: leading positions whose disk blocks are known.
        """
        last = self.save_point(length)
        if self._trimmable:
            return [last]
        known = BLOCK_SIZE * sum(1 for _ in takewhile(self._known.__contains__, hashes))
        fork = min(max(known, on_disk) // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE, last)
        if fork - cached < CHECKPOINTS * self._checkpoint:
            fork = 0  # it would take more memory than it saves work
        between = range(self._every, last - self._every // 2, self._every) if self._every else ()
        return sorted({point for point in (fork, last, *between) if point > cached})

    def save(self, hashes: Sequence[bytes]) -> CachedPrefix | None:
        """Add the prefix of these blocks. Return None if it is cached already or does not fit.

        The caller must make the ranks save it, and evict the prefixes in `take_evicted`.
        """
        length = len(hashes) * BLOCK_SIZE
        if not self._fits(length):
            return None
        if known := self._by_hash.get(hashes[-1]):
            self._cached_prefixes.move_to_end(next(reversed(known)))
            return None
        hits, taken = 0, dict[int, tuple[int, str]]()
        for digest in hashes[:-1]:
            if (key := self._ends.get(digest)) is not None:  # the new prefix contains the old one
                old = self._cached_prefixes[key]
                hits += old.hits
                taken |= {position: (count, key) for position, count in old.checkpoints.items()}
                self._evict(key)
        cached_prefix = self._make(hashes, length)
        for position in self._worth(taken, length):
            cached_prefix.checkpoints[position], key = taken.pop(position)
            cached_prefix.takes.append((key, position))
        cached_prefix.drops = [checkpoint_name(hashes[position // BLOCK_SIZE - 1]) for position in taken]
        self._shrink_to(self._room - self._cost(cached_prefix))
        self.positions += self._cost(cached_prefix)
        cached_prefix.hits = hits
        self._keep(cached_prefix)
        return cached_prefix

    def _worth(self, taken: dict[int, tuple[int, str]], length: int) -> list[int]:
        """Return the positions of the checkpoints that a prefix of `length` positions keeps beside its last one: those that
        were reused, then the latest, within `CHECKPOINTS` of its length."""
        room = min(CHECKPOINTS * length, self._room - self._reserved_positions - length - self._extra)
        most = max(int(room // max(self._checkpoint, 1)), 0)
        return sorted(taken, key=lambda position: (taken[position][0] > 0, position), reverse=True)[:most]

    def _cost(self, cached_prefix: CachedPrefix) -> int:
        """Return the positions that a cached prefix costs."""
        return cached_prefix.length + self._extra + self._checkpoint * max(len(cached_prefix.checkpoints) - 1, 0)

    def _fits(self, length: int) -> bool:
        """Return True if a prefix of `length` positions fits beside the reserved ones."""
        return self.enabled and length >= BLOCK_SIZE and self._reserved_positions + length + self._extra <= self._room

    @property
    def _reserved_positions(self) -> int:
        return sum(map(self._cost, self._reserved.values()))

    def _shrink_to(self, positions: int) -> None:
        """Evict the least recently used prefixes until at most `positions` are held, or only reserved ones remain."""
        while self._cached_prefixes and self.positions > positions:
            self._evict(next(iter(self._cached_prefixes)))

    def _make(self, hashes: Sequence[bytes], length: int) -> CachedPrefix:
        checkpoints = {} if self._trimmable else {length: 0}
        cached_prefix = CachedPrefix(f"p{self._next_key}", length, tuple(hashes), checkpoints)
        self._next_key += 1
        return cached_prefix

    def _served(self, cached_prefix: CachedPrefix) -> list[bytes]:
        """Return the hashes of the blocks up to whose ends a prefix can be reused."""
        if self._trimmable:
            return list(cached_prefix.hashes)
        return [cached_prefix.hashes[position // BLOCK_SIZE - 1] for position in cached_prefix.checkpoints]

    def _keep(self, cached_prefix: CachedPrefix) -> None:
        self._cached_prefixes[cached_prefix.key] = cached_prefix
        if not self._trimmable:
            self._known.update(cached_prefix.hashes)
        for digest in self._served(cached_prefix):
            self._by_hash.setdefault(digest, {})[cached_prefix.key] = None
        self._ends[cached_prefix.hashes[-1]] = cached_prefix.key

    def kept(self) -> list[CachedPrefix]:
        """Return the cached prefixes, most recently used first."""
        return list(reversed(self._cached_prefixes.values()))

    def holding(self, hashes: Sequence[bytes]) -> str | None:
        """Return the key of a cached prefix of all these blocks; None without one."""
        return next(reversed(self._by_hash[hashes[-1]])) if hashes and hashes[-1] in self._by_hash else None

    def hashes(self, key: str) -> tuple[bytes, ...]:
        """Return the block hashes of a cached prefix; empty if it was evicted."""
        return self._cached_prefixes[key].hashes if key in self._cached_prefixes else ()

    def disk_names(self, key: str) -> list[bytes]:
        """Return the names of a cached prefix's disk blocks and checkpoints; empty if it was evicted."""
        names = disk_block_names(self.hashes(key))
        points = self._cached_prefixes[key].checkpoints if names else ()
        return names + [checkpoint_name(names[at // DISK_BLOCK_SIZE - 1]) for at in points if at % DISK_BLOCK_SIZE == 0]

    def reserve(self, hashes: Sequence[bytes]) -> str | None:
        """Reserve room for a prefix of these blocks. Return the key for the ranks, None without room. Call `arrived` or
        `give_up` afterwards."""
        length = len(hashes) * BLOCK_SIZE
        if not self._fits(length):
            return None
        self._shrink_to(self._room - length - self._extra)
        cached_prefix = self._make(hashes, length)
        self.positions += self._cost(cached_prefix)
        self._reserved[cached_prefix.key] = cached_prefix
        return cached_prefix.key

    def arrived(self, key: str) -> None:
        """Make a reserved prefix available, as all ranks have read it."""
        if (cached_prefix := self._reserved.pop(key, None)) is not None:
            self._keep(cached_prefix)

    def give_up(self, key: str) -> None:
        """Drop a reserved prefix, as it could not be read; ranks must evict their part."""
        if (cached_prefix := self._reserved.pop(key, None)) is not None:
            self.positions -= self._cost(cached_prefix)
            self._evicted.append(key)

    def _evict(self, key: str) -> None:
        cached_prefix = self._cached_prefixes.pop(key)
        self.positions -= self._cost(cached_prefix)
        for digest in cached_prefix.hashes if self._known else ():
            self._known[digest] -= 1
            if not self._known[digest]:
                del self._known[digest]
        if self._ends.get(cached_prefix.hashes[-1]) == key:
            del self._ends[cached_prefix.hashes[-1]]
        for digest in self._served(cached_prefix):
            del self._by_hash[digest][key]
            if not self._by_hash[digest]:
                del self._by_hash[digest]
        self._evicted.append(key)

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Evict every prefix that contains one of these blocks, as any of them may be damaged."""
        damaged = set(hashes)
        for key in [key for key, one in self._cached_prefixes.items() if not damaged.isdisjoint(one.hashes)]:
            self._evict(key)

    def shrink(self, positions: int) -> None:
        """Evict the least recently used prefixes to free `positions` positions; none if that is not above 0."""
        self._shrink_to(self.positions - max(positions, 0))

    @property
    def spared(self) -> int:
        """KV positions reserved for prefixes during admission: reads in progress, or `SPARED` of the budget if prompts share
        beginnings. Otherwise waiting sequences would evict the prefixes that save them most."""
        return max(self._reserved_positions, int(SPARED * self.budget) if self._shared >= SHARED else 0)

    def limit(self, positions: int) -> None:
        """Limit the prefixes to `positions` until the next call; evict the least recently used beyond."""
        self._room = min(self._budget, positions)
        self._shrink_to(self._room)

    @property
    def leaving(self) -> bool:
        """True if some evictions have not been sent to the ranks."""
        return bool(self._evicted)

    def take_evicted(self) -> list[str]:
        """Return the keys that ranks must evict, since the last call."""
        evicted, self._evicted = self._evicted, []
        return evicted

    def clear(self) -> None:
        """Clear the index, as the ranks that held the prefixes are lost."""
        self._cached_prefixes.clear()
        self._known.clear()
        self._reserved.clear()
        self._by_hash.clear()
        self._evicted.clear()
        self._ends.clear()
        self.positions = 0


def block_hashes(tokens: Sequence[int], salt: bytes = b"") -> list[bytes]:
    """Return 16-byte hashes of the whole blocks of `tokens`; each also covers all tokens before its block, and `salt` (the
    LoRA adapter, or the hash of the block before the first)."""
    hashes: list[bytes] = []
    digest = salt
    for start in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
        block = tokens[start : start + BLOCK_SIZE]
        try:
            content = array("I", block).tobytes()
        except OverflowError:  # numbers of pictures
            content = str(block).encode()
        digest = hashlib.blake2b(digest + content, digest_size=NAME_BYTES).digest()
        hashes.append(digest)
    return hashes


def disk_block_names(hashes: Sequence[bytes]) -> list[bytes]:
    """Return the names of the whole disk blocks of a prefix with these `block_hashes`."""
    blocks = DISK_BLOCK_SIZE // BLOCK_SIZE
    return list(hashes[blocks - 1 :: blocks])


class DiskBlockIndex:
    """Set of disk blocks of each rank, local or remote. Contains a disk block if every rank has its part."""

    def __init__(self) -> None:
        self._ranks: list[set[bytes]] = []

    def reset(self, kept: Sequence[Iterable[bytes]]) -> None:
        """Reset to these blocks of each rank."""
        self._ranks = [set(names) for names in kept]

    def keep(self, rank: int, names: Iterable[bytes]) -> None:
        """Add blocks that a rank has."""
        self._ranks[rank].update(names)

    def see(self, rank: int, names: Iterable[bytes], wanted: Iterable[bytes] | None = None) -> None:
        """Replace the blocks of a rank, or only those among `wanted`."""
        self._ranks[rank].difference_update(list(self._ranks[rank]) if wanted is None else wanted)
        self.keep(rank, names)

    def lose(self, names: Iterable[bytes]) -> None:
        """Remove blocks that some rank has lost, as they are useless to all ranks."""
        gone = set(names)
        for held in self._ranks:
            held -= gone

    def __len__(self) -> int:
        """Number of disk blocks that all ranks have, without checkpoints."""
        return sum(not is_checkpoint(name) for name in set.intersection(*self._ranks)) if self._ranks else 0

    def __contains__(self, name: bytes) -> bool:
        return bool(self._ranks) and all(name in held for held in self._ranks)

    def anywhere(self, name: bytes) -> bool:
        """Return True if at least one rank has the block."""
        return any(name in held for held in self._ranks)

    def leading(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the names before the first missing one."""
        return list(takewhile(self.__contains__, names))
