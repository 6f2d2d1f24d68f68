"""Choose the replica for each request: the one with the least pending work, minus what its prefix cache saves.

Work is counted in tokens: prompts not yet computed plus expected output. A replica that was recently sent the same prefix
need not compute that part again. So it is preferred until its extra work exceeds the tokens it saves. Replicas with a
shared KV directory, or with remote KV, read each other's prefixes, which saves a share of the work.

Replicas have roles. Prefill replicas get only long prompts, which others decode; other replicas get everything else.
Roles are preferences: without a replica of the right role, any other serves. Pure: no clock, no sockets, one thread.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product

from tandem.config.settings import Role
from tandem.kv.index import block_hashes
from tandem.protocol.kv_blocks import BLOCK_SIZE, DISK_BLOCK_SIZE

EXPECTED_OUTPUT = 256
"""Output tokens expected of a request, unless its limit is lower: few requests come near their limit."""
TAIL = 32
"""Further output tokens expected of a request beyond `EXPECTED_OUTPUT`."""

CAPACITY = 8192
"""Blocks remembered for one replica (262,144 tokens)."""
MOST_BLOCKS = 512
"""Most blocks of one prompt to hash and compare, to bound the time per request."""
DISK_CAPACITY = 65536
"""Blocks remembered for one disk (2 million tokens)."""
LONG = 512
"""Tokens to compute from which a prompt is long, so that its prefill would slow down decoding requests."""
SLOWER = 2.0
"""Most time a prefill replica may take for a prompt, as a multiple of the decoding replica's."""
AGAIN = 16
"""One of this many prompts above `SLOWER` is sent to the prefill replica anyway, since speeds change."""
LATER = 4.0
"""Most time to first token at a prefill replica, queues included, as a multiple of the decoding replica's, per request
at the latter."""
KEY_TOKENS = 8192
"""Value, in tokens of work, of sending requests with the same cache key to one replica."""

_RANK = {"ready": 0, "recovering": 1}
"""States in which a replica takes requests; those with a higher number only while no replica has a lower one. A starting
replica takes none, as its first load may fail."""


def prompt_hashes(tokens: Sequence[int], adapter: str = "") -> list[bytes]:
    """Return the hashes of the first `MOST_BLOCKS` whole blocks, as the engine's prefix cache computes them."""
    return block_hashes(tokens[: MOST_BLOCKS * BLOCK_SIZE], adapter.encode())


class SentPrefixes:
    """LRU set of the blocks that were sent to one replica or disk."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity`: most blocks."""
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, hashes: Sequence[bytes]) -> None:
        """Record a sent prompt by its block hashes. Its last block is evicted first, as later blocks need earlier ones."""
        for digest in reversed(hashes):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def matched(self, hashes: Sequence[bytes]) -> int:
        """Return the length, in tokens, of the longest prefix that was sent before."""
        count = 0
        for digest in hashes:
            if digest not in self._blocks:
                break
            count += 1
        return count * BLOCK_SIZE

    def clear(self) -> None:
        """Forget all blocks, as the replica's cache is lost."""
        self._blocks.clear()


@dataclass(eq=False)
class Placement:
    """One request at its chosen replica, counted in the replica's load until `end`."""

    replica: int
    state: ReplicaLoad
    max_tokens: int
    prefill: int
    """Prompt tokens to compute; 0 after the first output."""
    done: int
    """Output tokens so far."""
    kept: int = 0
    """Leading tokens that the replica can read from a KV store, if more than it has in memory; else 0."""
    leaves: bool = False
    """True if another replica continues the request after prefill."""

    @property
    def left(self) -> int:
        """Expected work in tokens."""
        if self.leaves and self.prefill:
            return self.prefill
        output = min(self.max_tokens - self.done, max(EXPECTED_OUTPUT - self.done, TAIL))
        return self.prefill + max(output, 0)

    def advance(self, tokens: int) -> None:
        """Count `tokens` more output tokens; no effect after `end`."""
        if self in self.state.placements:
            before = self.left
            self.prefill = 0
            self.done += tokens
            self.state.load += self.left - before

    def end(self) -> None:
        """Remove the request from its replica's load. Idempotent."""
        if self in self.state.placements:
            self.state.placements.remove(self)
            self.state.load -= self.left


@dataclass(eq=False)
class ReplicaLoad:
    """The router's record of a replica: state, KV store, role, and placed requests."""

    state: str = "silent"
    sent: SentPrefixes = field(default_factory=SentPrefixes)
    store: str = ""
    """KV directories, separated by blanks; empty for none."""
    saves: float = 0.0
    """Share of the prefill time, from 0 to 1, that reading from its own store saves."""
    reach: frozenset[str] = frozenset()
    """KV directories it can read, including remote KV."""
    lent_saves: float = 0.0
    """Share of the prefill time, from 0 to 1, that reading remote KV saves."""
    role: Role = "both"
    pace: float = 0.0
    """Prefill speed in tokens per second; 0: unknown."""
    room: int = 0
    """Longest prefix, in tokens, that it can load from a store."""
    load: int = 0
    """Pending work in tokens: the sum of `left` over its placements."""
    placements: set[Placement] = field(default_factory=set)
    last: int = 0
    """Sequence number of the last placement here; breaks ties."""


class Router:
    """Router over replicas, by their state, load, role and recently sent prefixes."""

    def __init__(self, *, affinity: bool = True) -> None:
        """`affinity`: consider recently sent prefixes; for engines with prefix caches."""
        self._affinity = affinity
        self._replicas: dict[int, ReplicaLoad] = {}
        self._stores: dict[str, SentPrefixes] = {}
        """Prefixes sent to replicas with this KV store, by store."""
        self._choices = 0
        self._slow = 0
        """Number of prompts for which a prefill replica was too slow."""

    # --- replicas ---

    def join(self, replica: int) -> None:
        """Add a replica; it gets no requests until `set_state`."""
        self._replicas.setdefault(replica, ReplicaLoad())

    def leave(self, replica: int) -> None:
        """Remove a replica for good; unknown ones are ignored."""
        self._replicas.pop(replica, None)

    def set_state(self, replica: int, state: str) -> None:
        """Set a replica's state; it takes requests in `ready` and `recovering`.

        The other states are `starting`, `draining`, `failed` and `silent`.
        """
        known = self._replicas[replica]
        if known.state != state and state != "draining":
            known.sent.clear()  # its ranks are replaced, which loses their caches
        known.state = state

    def set_disk(self, replica: int, store: str, saves: float, reach: Iterable[str] = (), lent_saves: float = 0.0) -> None:
        """Set a replica's KV `store`: directories separated by blanks, empty for none. Replicas that share it have the same.

        `reach`: directories it can read, including remote KV. `saves`, `lent_saves`: share of the prefill time, from 0 to
        1, that reading from its own store or from remote KV saves.
        """
        known = self._replicas[replica]
        known.store, known.saves, known.reach, known.lent_saves = store, saves, frozenset(reach), lent_saves

    def set_role(self, replica: int, role: Role, pace: float = 0.0, room: int = 0) -> None:
        """Set a replica's role, its prefill speed in tokens/s (0: unknown), and the longest prefix it can load, in tokens."""
        known = self._replicas[replica]
        known.role, known.pace, known.room = role, pace, room

    def reads(self, replica: int, store: str) -> bool:
        """Return whether the replica can read KV written by replicas with this store."""
        known = self._replicas[replica]
        return store != "" and (store == known.store or known.reach.issuperset(store.split()))

    def outstanding(self, replica: int) -> int:
        """Return a replica's pending work in tokens."""
        return self._replicas[replica].load

    def requests(self, replica: int) -> int:
        """Return the number of requests at a replica."""
        return len(self._replicas[replica].placements)

    # --- requests ---

    def place(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        *,
        done: int = 0,
        avoid: Collection[int] = (),
        key: str = "",
        on_disk: bool = True,
        may_leave: bool = False,
        written: Mapping[str, int] | None = None,
        adapter: str = "",
    ) -> Placement | None:
        """Choose a replica for a request and add it to its load; None if no replica outside `avoid` takes requests.

        `tokens`: the prompt, plus the `done` output tokens that another replica has produced. Requests with the same `key`
        go to one replica, unless it has `KEY_TOKENS` more work. `on_disk`: the replica writes the prompt's KV to disk.
        `may_leave`: prefill and decode may run at different replicas. `written`: leading tokens known to be in a KV store,
        by store. `adapter`: LoRA adapter, whose KV is its own.
        """
        candidates = self._candidates(avoid)
        if not candidates:
            return None
        others = len(self._replicas) > 1 or any(map(len, self._stores.values()))  # removed replicas may have written KV
        hashes = prompt_hashes(tokens, adapter) if self._affinity and others else []
        saved = {index: self._replicas[index].sent.matched(hashes) for index in candidates}
        stores = self._stores if hashes else {}
        on_disks = {store: sent.matched(hashes) // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE for store, sent in stores.items()}
        kept, cheap = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0)
        for i, (store, tokens_there) in product(candidates, (on_disks | dict(written or {})).items()):
            if self.reads(i, store):
                share = self._replicas[i].saves if store == self._replicas[i].store else self._replicas[i].lent_saves
                kept[i] = max(kept[i], tokens_there)
                cheap[i] = max(cheap[i], int(max(tokens_there - saved[i], 0) * share))
        worth = {i: saved[i] + cheap[i] for i in candidates}
        homes = [i for i in candidates if self._replicas[i].role != "prefill"] or candidates
        worth |= {home: max(worth[home], KEY_TOKENS)} if (home := _home(key, homes)) is not None else {}
        best = min(homes, key=lambda i: (self._replicas[i].load - worth[i], self._replicas[i].last))
        work, leaves = {i: len(tokens) - saved[i] - cheap[i] for i in candidates}, False
        if len(tokens) - max(saved[best], kept[best]) >= LONG:
            ends = max_tokens - done <= 1
            best, leaves = self._reader(best, work, len(tokens), ends=ends, may_leave=may_leave)
        chosen = self._replicas[best]
        placement = Placement(best, chosen, max_tokens, work[best], done, kept[best] if kept[best] > saved[best] else 0, leaves)
        chosen.placements.add(placement)
        chosen.load += placement.left
        chosen.sent.note(hashes)
        if on_disk and not leaves and chosen.store:
            self._stores.setdefault(chosen.store, SentPrefixes(DISK_CAPACITY)).note(hashes)
        self._choices += 1
        chosen.last = self._choices
        return placement

    def _reader(self, home: int, work: Mapping[int, int], tokens: int, *, ends: bool, may_leave: bool) -> tuple[int, bool]:
        """Choose the replica to prefill a long prompt that `home` decodes; also return whether the request moves afterwards.

        `work`: tokens to compute, by candidate. `tokens`: length of the prompt. `ends`: no decode follows.
        """
        known = self._replicas
        if known[home].role == "prefill":
            return home, False
        apart = [i for i in work if known[i].role == "prefill" and (ends or (may_leave and self._follows(home, i, tokens)))]
        mixed = [i for i in work if known[i].role == "both"] if known[home].role == "decode" else []
        for readers in filter(None, (apart, mixed)):
            paced = all(known[i].pace for i in readers)
            best = min(readers, key=lambda i: (known[i].load + work[i]) / (known[i].pace if paced else 1.0))
            if self._bears(best, home, work):
                return best, readers is apart and not ends
        return home, False

    def _follows(self, home: int, reader: int, tokens: int) -> bool:
        """Return whether `home` can load the KV of `tokens` tokens that `reader` computes."""
        return (
            self.reads(home, self._replicas[reader].store)
            and self._replicas[home].room >= tokens // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE
        )

    def _bears(self, reader: int, home: int, work: Mapping[int, int]) -> bool:
        """Return whether prefill at `reader` is fast enough compared with `home` (see `SLOWER` and `LATER`)."""
        there, here = self._replicas[reader], self._replicas[home]
        ratio = here.pace / there.pace if here.pace and there.pace else 1.0
        if ratio * work[reader] > SLOWER * work[home]:
            self._slow += 1
            return self._slow % AGAIN == 0
        return ratio * (there.load + work[reader]) <= LATER * max(len(here.placements), 1) * (here.load + work[home])

    def _candidates(self, avoid: Collection[int]) -> list[int]:
        ranks = {
            index: _RANK[replica.state]
            for index, replica in self._replicas.items()
            if replica.state in _RANK and index not in avoid
        }
        best = min(ranks.values(), default=0)
        return [index for index, rank in ranks.items() if rank == best]

    def check(self) -> None:
        """Raise AssertionError unless loads and placements are consistent (for tests)."""
        for index, replica in self._replicas.items():
            assert all(placement.replica == index and placement.state is replica for placement in replica.placements)
            assert replica.load == sum(placement.left for placement in replica.placements) >= 0


def _home(key: str, replicas: Collection[int]) -> int | None:
    """Return the replica for a cache key; None without a key or with a single replica.

    Rendezvous hashing (Thaler and Ravishankar 1998): all apis agree, and few keys move when replicas change.
    """
    if not key or len(replicas) < 2:
        return None
    return max(replicas, key=lambda index: hashlib.blake2b(f"{index}:{key}".encode(), digest_size=8).digest())
