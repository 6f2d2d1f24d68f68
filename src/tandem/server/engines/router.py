"""Which replica gets a request: the one with the least work before it, counting what its prefix cache saves.

Work is counted in tokens: prompts not yet answered, and output still to come. A replica that was lately sent a prompt
with the same beginning need not compute that part again, so it is preferred until it has more work before it than the
least loaded one by exactly the tokens that it saves. Replicas that keep prompts in the same directory, or lend them to
one another, read what another of them was sent: that saves a share of computing it.

Replicas have roles. Those for prefill get long prompts alone, which go on elsewhere once they are computed; the others
get all else. Roles are wishes: whoever is there does what has to be done. Pure: no clock, no sockets; used by one
thread.
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
"""Tokens of output that a request is expected to have, when its limit is higher: few come near their limit."""
TAIL = 32
"""Tokens that are still expected of one that has gone beyond that."""

CAPACITY = 8192
"""Blocks remembered for one replica (262,144 tokens)."""
MOST_BLOCKS = 512
"""Blocks of one prompt that are looked at, so that a very long one does not hold up the others."""
DISK_CAPACITY = 65536
"""Blocks remembered for one disk (2 million tokens)."""
LONG = 512
"""Tokens to compute from which a prompt disturbs those who decode."""
SLOWER = 2.0
"""A replica for prefill may take this many times as long for a prompt as the one where the request continues."""
AGAIN = 16
"""Every so many prompts that would take too long there, one goes there all the same: speeds change."""
LATER = 4.0
"""The first token may come this many times as late from there, queues counted, for each request that is decoded where
the prompt would otherwise be computed."""
KEY_TOKENS = 8192
"""Value, in tokens of work, of keeping requests with one key together."""

_RANK = {"ready": 0, "recovering": 1}
"""States in which a replica takes requests; a rank above 0 only while none of a lower one can. One that loads for the
first time refuses them, for it may never serve; what was accepted elsewhere waits until it does."""


def prompt_hashes(tokens: Sequence[int]) -> list[bytes]:
    """Hashes of the first `MOST_BLOCKS` whole blocks, the same ones as the engine's prefix cache uses."""
    return block_hashes(tokens[: MOST_BLOCKS * BLOCK_SIZE])


class SentPrefixes:
    """The blocks that one replica was sent; the least recently sent are forgotten first."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        """`capacity` in blocks."""
        self._capacity = capacity
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def note(self, hashes: Sequence[bytes]) -> None:
        """Record a prompt that was sent. Its last block is forgotten first: it needs the others."""
        for digest in reversed(hashes):
            self._blocks[digest] = None
            self._blocks.move_to_end(digest)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def matched(self, hashes: Sequence[bytes]) -> int:
        """Tokens of the longest prefix that was sent before."""
        count = 0
        for digest in hashes:
            if digest not in self._blocks:
                break
            count += 1
        return count * BLOCK_SIZE

    def clear(self) -> None:
        """Forget all blocks: the replica's cache is gone."""
        self._blocks.clear()


@dataclass(eq=False)
class Placement:
    """One request at the replica that was chosen for it, until `end`."""

    replica: int
    state: ReplicaLoad
    max_tokens: int
    prefill: int
    """Prompt tokens to compute; 0 from the first output on."""
    done: int
    """Output tokens so far."""
    kept: int = 0
    """Leading tokens that others wrote where this replica reads them, and that it does not have in memory."""
    leaves: bool = False
    """True when it continues elsewhere once its prompt is computed."""

    @property
    def left(self) -> int:
        """Tokens of work that are expected."""
        if self.leaves and self.prefill:
            return self.prefill
        output = min(self.max_tokens - self.done, max(EXPECTED_OUTPUT - self.done, TAIL))
        return self.prefill + max(output, 0)

    def advance(self, tokens: int) -> None:
        """Count `tokens` more of output; nothing after `end`."""
        if self in self.state.placements:
            before = self.left
            self.prefill = 0
            self.done += tokens
            self.state.load += self.left - before

    def end(self) -> None:
        """Take the request off its replica. Safe to call again."""
        if self in self.state.placements:
            self.state.placements.remove(self)
            self.state.load -= self.left


@dataclass(eq=False)
class ReplicaLoad:
    """A replica as the router knows it: state, disk, role, and what is placed there."""

    state: str = "silent"
    sent: SentPrefixes = field(default_factory=SentPrefixes)
    store: str = ""
    """Name of its disk; empty for none."""
    saves: float = 0.0
    """Share of the time to compute a prompt that reading it from disk saves."""
    reach: frozenset[str] = frozenset()
    """Directories that it reads from, including those that others lend."""
    lent_saves: float = 0.0
    """Share that reading from directories of others saves."""
    role: Role = "both"
    pace: float = 0.0
    """Prompt tokens per second; 0: unknown."""
    room: int = 0
    """Longest prefix, in tokens, that it can take from elsewhere."""
    load: int = 0
    """Sum of `left` over its placements."""
    placements: set[Placement] = field(default_factory=set)
    last: int = 0
    """Number of the choice that took it last."""


class Router:
    """Knows each replica's state, load and recent prompts."""

    def __init__(self, *, affinity: bool = True) -> None:
        """`affinity`: the engines have prefix caches, so where a prompt's beginning was sent before matters."""
        self._affinity = affinity
        self._replicas: dict[int, ReplicaLoad] = {}
        self._stores: dict[str, SentPrefixes] = {}
        """Prefixes sent to any replica with this disk."""
        self._choices = 0
        self._slow = 0
        """Prompts for which a replica for prefill was too slow."""

    # --- replicas ---

    def join(self, replica: int) -> None:
        """A new replica; it gets nothing before `set_state` says that it can."""
        self._replicas.setdefault(replica, ReplicaLoad())

    def leave(self, replica: int) -> None:
        """Remove a replica for good; unknown ones are ignored."""
        self._replicas.pop(replica, None)

    def set_state(self, replica: int, state: str) -> None:
        """`ready`, `recovering`, or one in which it takes nothing (`starting`, `draining`, `failed`, `silent`)."""
        known = self._replicas[replica]
        if known.state != state and state != "draining":
            known.sent.clear()  # its ranks were or will be replaced, and their caches with them
        known.state = state

    def set_disk(self, replica: int, store: str, saves: float, reach: Iterable[str] = (), lent_saves: float = 0.0) -> None:
        """Set where a replica keeps prompts: directories with blanks between them, empty for nowhere.

        Replicas that read what one another writes have the same. `saves`: share of the time to compute a prompt that
        reading it from there saves. `reach`: directories that it reads from, including those that others lend it, for
        which the share is `lent_saves`.
        """
        known = self._replicas[replica]
        known.store, known.saves, known.reach, known.lent_saves = store, saves, frozenset(reach), lent_saves

    def set_role(self, replica: int, role: Role, pace: float = 0.0, room: int = 0) -> None:
        """Set its role, its prompt tokens per second (0: unknown), and the longest prefix that it has room for."""
        known = self._replicas[replica]
        known.role, known.pace, known.room = role, pace, room

    def reads(self, replica: int, store: str) -> bool:
        """True if it can read what replicas with this store have written."""
        known = self._replicas[replica]
        return store != "" and (store == known.store or known.reach.issuperset(store.split()))

    def outstanding(self, replica: int) -> int:
        """Tokens of work before a replica."""
        return self._replicas[replica].load

    def requests(self, replica: int) -> int:
        """Requests at a replica."""
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
    ) -> Placement | None:
        """Choose a replica for a request and count it there; None when none but those in `avoid` takes requests.

        `tokens` is all that has to be computed: the prompt, and the `done` tokens that another replica has produced.
        Requests with the same `key` go to the same replica, unless that has `KEY_TOKENS` more work before it.
        `on_disk`: the prompt is written there. `may_leave`: one replica may compute the prompt and another continue.
        `written`: leading tokens that replicas' stores certainly hold, by store.
        """
        candidates = self._candidates(avoid)
        if not candidates:
            return None
        others = len(self._replicas) > 1 or any(map(len, self._stores.values()))  # or have been and wrote
        hashes = prompt_hashes(tokens) if self._affinity and others else []
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
        """Choose who computes a long prompt whose request continues at `home`, and whether it leaves afterwards.

        `work`: tokens to compute, by candidate. `ends`: no output follows.
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
        """True if `home` can take over `tokens` that `reader` computes."""
        return (
            self.reads(home, self._replicas[reader].store)
            and self._replicas[home].room >= tokens // DISK_BLOCK_SIZE * DISK_BLOCK_SIZE
        )

    def _bears(self, reader: int, home: int, work: Mapping[int, int]) -> bool:
        """True if the first token would not come much later from `reader`."""
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
        """Raise AssertionError unless the tables agree (for tests)."""
        for index, replica in self._replicas.items():
            assert all(placement.replica == index and placement.state is replica for placement in replica.placements)
            assert replica.load == sum(placement.left for placement in replica.placements) >= 0


def _home(key: str, replicas: Collection[int]) -> int | None:
    """Return where requests with this key go, None for no key or one replica.

    All apis choose alike, and few keys move when a replica joins or leaves (rendezvous hashing, Thaler and
    Ravishankar 1998).
    """
    if not key or len(replicas) < 2:
        return None
    return max(replicas, key=lambda index: hashlib.blake2b(f"{index}:{key}".encode(), digest_size=8).digest())
