"""Disk tier of the prefix cache: which prefixes are fetched into memory, and which sequences wait for them.

The engine decides; ranks read and write in separate threads. A fetched prefix is then cached in memory like others
(`tandem.kv.index`). Prefixes that cannot be read are computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Protocol

from tandem.kv.index import DiskBlockIndex, PrefixIndex, disk_block_names
from tandem.protocol.kv_blocks import (
    BLOCK_SIZE,
    DISK_BLOCK_SIZE,
    NAME_BYTES,
    Fetch,
    Fetched,
    StoreOp,
    Survey,
    Surveyed,
    UseRemoteStores,
    Written,
    checkpoint_name,
    is_checkpoint,
)
from tandem.protocol.quarantine import QuarantineRecord
from tandem.protocol.request import EngineRequest

NEAR = 2048
"""Positions that count as the beginning of a prompt."""
OLD = 0.8
"""Weight of earlier measurements in a moving average."""
SLOWER = 4.0
"""Allowed read time of a prompt that another replica computed for this one, as a multiple of computing it."""
AGAIN = 64
"""Skipped reads after which one is tried anyway, since speeds change."""
GUESS, LENT_GUESS = 0.5, 0.25
"""Assumed fraction of prefill time saved by reading from disk, and by fetching from another machine, until measured."""


class Seeking(Protocol):
    """Sequence whose prefix may be read from disk."""

    request: EngineRequest
    tokens: list[int]
    quarantine_record: QuarantineRecord
    finished: bool
    fetched: int
    """KV positions read from disk for it, beyond those cached in memory."""
    awaits_kv: bool
    """True while its prefix is read; it cannot join a batch before."""
    disk_checked: bool
    """True once ranks were asked to look for its KV, written by another engine, on their disks."""

    def hashes(self, length: int) -> list[bytes]:
        """Return the hashes of the blocks of its first `length` tokens."""

    @property
    def whole(self) -> bool:
        """True if it needs the hidden states of all positions, so it cannot use cached prefixes."""


@dataclass
class DiskSpeed:
    """Moving average of a speed in tokens per second."""

    tokens_s: float = 0.0
    seen: int = 0
    """Tokens measured so far."""

    def measure(self, tokens: int, seconds: float) -> None:
        """Record that `tokens` took `seconds`."""
        if tokens > 0 and seconds > 0:
            now = tokens / seconds
            self.seen += tokens
            self.tokens_s = OLD * self.tokens_s + (1 - OLD) * now if self.tokens_s else now


@dataclass
class DiskCounts:
    """Totals since the engine started."""

    hit_tokens: int = 0
    """KV positions read instead of computed."""
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    written_s: float = 0.0
    failures: int = 0
    """Number of prefixes that could not be read."""
    brought_bytes: int = 0
    """Bytes of files fetched from other machines."""


@dataclass
class _Order:
    """Pending `Fetch` or `Survey` of all ranks, and the sequences waiting for it."""

    waiting: list[Seeking] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    """Disk blocks to fetch."""
    gain: int = 0
    """KV positions that this prefix adds to those in memory."""
    wanted: frozenset[bytes] | None = None
    """Disk blocks to look for; None for all."""
    then: Callable[[], None] | None = None
    """Callback once all ranks have answered, used when no sequences wait."""
    answers: dict[int, Any] = field(default_factory=dict)
    """Answers by rank: `Fetched` or `Surveyed`."""


class DiskTier:
    """Disk tier: selection of prefixes to read from disk, and pending reads. Used only by the scheduler."""

    def __init__(self, *, checkpoints: bool = False) -> None:
        """Create the tier without ranks. `checkpoints`: see the attribute."""
        self.checkpoints = checkpoints
        """True if a prefix can be read only up to a checkpoint."""
        self.orders: list[Fetch | UseRemoteStores | Survey] = []
        """Orders to send to all ranks before the next plan; the sender empties the list."""
        self.counts = DiskCounts()
        self.computing = DiskSpeed()
        """Speed of computing prompts."""
        self.beginning = DiskSpeed()
        """Speed of computing the first `NEAR` positions of prompts, comparable between replicas. Later positions take longer."""
        self._reading, self._bringing = DiskSpeed(), DiskSpeed()
        """Speeds of reading from local disks, and of fetching from other machines."""
        self._too_slow = 0
        """Number of reads skipped as too slow."""
        self._disk_blocks = DiskBlockIndex()
        self._lent = DiskBlockIndex()
        """Disk blocks for which a rank needs remote files, as of its last survey."""
        self._ranks = 0
        self._asked: dict[str | int, _Order] = {}
        """Pending fetches by prefix key, and surveys by number."""
        self._looked = 0
        self._silent = False
        """True while disks do not respond: nothing is read until an order is answered by all ranks."""

    @property
    def fetching(self) -> str | int | None:
        """Key of the prefix, or number of the survey, that some sequence has waited for longest; None without any."""
        return next((key for key, asked in self._asked.items() if asked.waiting), None)

    @property
    def on(self) -> bool:
        """True if all ranks have a disk cache that responds."""
        return self._ranks > 0 and not self._silent

    @property
    def saves(self) -> float:
        """Fraction of prefill time saved by reading from disk; an estimate until measured."""
        return self._saved(self._reading, GUESS)

    @property
    def lent_saves(self) -> float:
        """Fraction of prefill time saved by fetching from other machines; an estimate until measured."""
        return self._saved(self._bringing, LENT_GUESS)

    def _saved(self, pace: DiskSpeed, guess: float) -> float:
        if not (pace.tokens_s and self.computing.tokens_s):
            return guess if self.on else 0.0
        return max(0.0, 1.0 - self.computing.tokens_s / pace.tokens_s)

    def computed(self, count: int, longest: int, seconds: float) -> None:
        """Record a step without decoding: `count` prompt tokens at positions below `longest` took `seconds`."""
        self.computing.measure(count, seconds)
        if longest <= NEAR:
            self.beginning.measure(count, seconds)

    def begin(
        self,
        kept: Iterable[list[bytes] | None],
        waiting: Iterable[Seeking],
        prefixes: PrefixIndex,
        remote_stores: Iterable[tuple[str, str]] = (),
    ) -> None:
        """Start with new ranks. `kept`: disk blocks on each rank's disk, None for a rank without a disk cache.
        `remote_stores`: (`Ready.store`, endpoint) of other ranks' KV directories."""
        names, others = list(kept), dict(remote_stores)
        self.reset([] if None in names else [one or [] for one in names])
        if self._ranks and len(others) > 1:
            self.orders.append(UseRemoteStores(list(others.items())))
            self._look_for(*waiting)
            return
        for sequence in waiting:
            self.seek(sequence, prefixes)

    def use_remote_stores(self, remote_stores: Iterable[tuple[str, str]]) -> None:
        """Make the ranks use these remote KV directories, and list their blocks. Returns at once."""
        if self._ranks:
            self.orders.append(UseRemoteStores(list(dict(remote_stores).items())))
            self._survey(soon=True)

    def reset(self, kept: Sequence[Iterable[bytes]] = ()) -> None:
        """Drop all pending orders, as the ranks have ended. `kept`: disk blocks of each new rank."""
        self.lose_patience()
        self._asked.clear()
        self._silent = False
        self.orders.clear()
        self._ranks = len(kept)
        self._disk_blocks.reset(kept)
        self._lent.reset([()] * self._ranks)

    def seek(self, sequence: Seeking, prefixes: PrefixIndex) -> None:
        """Fetch the longest prefix of a waiting sequence into memory, if disks have more of it than memory and reading is
        faster than computing."""
        sequence.fetched = 0
        if not self.on or sequence.whole or sequence.quarantine_record.suspect:
            return
        hashes = sequence.hashes(len(sequence.tokens) - 1)
        every = disk_block_names(hashes)
        usable = self._usable(every)
        told = not sequence.disk_checked and sequence.request.kept >= DISK_BLOCK_SIZE
        if told and len(usable) < min(sequence.request.kept // DISK_BLOCK_SIZE, len(every)):
            self._look_for(sequence, wanted=self._with_checkpoints(every))
            return
        if len(usable) < len(every) and not sequence.disk_checked:
            for look in reversed(self._asked.values()):
                if not look.names and not look.then and (look.wanted is None or every[len(usable)] in look.wanted):
                    look.waiting.append(sequence)
                    sequence.awaits_kv = sequence.disk_checked = True
                    return
        here = prefixes.peek(hashes)
        # Read a migrated prompt at any speed, since it migrated so that this replica need not compute it.
        came = sequence.request.kept >= DISK_BLOCK_SIZE and bool(sequence.request.produced)
        for names in (usable, self._own(usable)):
            blocks, gain = len(names), len(names) * DISK_BLOCK_SIZE - here
            if gain >= DISK_BLOCK_SIZE and (came or self._pays(names, gain)):
                break
        else:
            return
        if self.checkpoints:
            names = [*names, checkpoint_name(names[-1])]
        for asked in self._asked.values():
            if asked.names[: len(names)] == names:
                break
        else:
            key = prefixes.reserve(hashes[: blocks * DISK_BLOCK_SIZE // BLOCK_SIZE])
            if key is None:
                return
            # A migrated prompt may take longer, since computing it here would delay other requests.
            within_s = (SLOWER if came else 1.0) * gain / self.computing.tokens_s if self.computing.tokens_s else 0.0
            self.orders.append(Fetch(key, names, within_s))
            asked = self._asked[key] = _Order(names=names, gain=gain)
        asked.waiting.append(sequence)
        sequence.awaits_kv, sequence.fetched = True, gain

    def _look_for(self, *sequences: Seeking, wanted: list[bytes] | None = None) -> None:
        """Survey the disks for blocks of these prompts from other engines, before they are sought again. `wanted`: the blocks
        to look for; None for all."""
        number = self._survey(soon=True, wanted=wanted)
        self._asked[number] = _Order(list(sequences), wanted=None if wanted is None else frozenset(wanted))
        for sequence in sequences:
            sequence.awaits_kv = sequence.disk_checked = True

    def look(self, then: Callable[[], None], *, drop: bool) -> dict[int, Surveyed]:
        """Make all ranks list their disk blocks after queued writes, or delete them first with `drop`. Return a dict that
        collects the answers by rank; `then` is called once it is complete."""
        asked = self._asked[self._survey(drop=drop)] = _Order(then=then)
        return asked.answers

    def _survey(self, *, drop: bool = False, soon: bool = False, wanted: list[bytes] | None = None) -> int:
        self._looked += 1
        self.orders.append(Survey(self._looked, drop, soon, wanted))
        return self._looked

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Make the ranks delete a prompt's disk blocks, after queued writes."""
        self.delete(self._with_checkpoints(disk_block_names(hashes)))

    def delete(self, names: list[bytes]) -> None:
        """Make the ranks delete these disk blocks and checkpoints, after queued writes."""
        if self._ranks and names:
            self._disk_blocks.lose(names)
            self._survey(drop=True, wanted=names)

    def names(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return the names of the whole disk blocks of a prefix, and of the checkpoint at their end if the model has any."""
        names = disk_block_names(hashes)
        return [*names, checkpoint_name(names[-1])] if names and self.checkpoints else names

    def _with_checkpoints(self, names: list[bytes]) -> list[bytes]:
        """Return these disk blocks, and the checkpoints at their ends if the model has any."""
        return [*names, *map(checkpoint_name, names)] if self.checkpoints else names

    def _usable(self, names: Sequence[bytes]) -> list[bytes]:
        """Return the leading disk blocks that are on disk, up to the last checkpoint if the model has any."""
        return self._to_checkpoint(self._disk_blocks.leading(names))

    def _to_checkpoint(self, names: list[bytes], *, own: bool = False) -> list[bytes]:
        """Return `names` up to the last one with a checkpoint, which is on local disks with `own`."""
        while self.checkpoints and names:
            checkpoint = checkpoint_name(names[-1])
            if checkpoint in self._disk_blocks and not (own and self._lent.anywhere(checkpoint)):
                break
            names = names[:-1]
        return names

    def _own(self, names: list[bytes]) -> list[bytes]:
        """Leading blocks available on local disks."""
        return self._to_checkpoint(list(takewhile(lambda name: not self._lent.anywhere(name), names)), own=True)

    def _pays(self, names: list[bytes], gain: int) -> bool:
        pace = self._reading if len(self._own(names)) == len(names) else self._bringing
        if self._saved(pace, 1.0) > 1.0 - gain / (len(names) * DISK_BLOCK_SIZE):
            return True
        self._too_slow += 1
        return self._too_slow % AGAIN == 0

    def take(self, report: Fetched | Written | Surveyed, prefixes: PrefixIndex) -> None:
        """Process a rank's report. The last rank's answer to a fetch makes the prefix available, or ends the attempt."""
        if report.rank >= self._ranks:
            return  # a rank without a disk cache disables the disk tier
        if isinstance(report, Written):
            self._disk_blocks.keep(report.rank, report.names)
            self._disk_blocks.lose(report.gone)
            self.counts.written_bytes += report.nbytes
            self.counts.written_s += report.seconds
            return
        if isinstance(report, Surveyed):
            self._disk_blocks.see(report.rank, report.names, report.wanted)
            self._lent.see(report.rank, report.lent, report.wanted)
        key = report.key if isinstance(report, Fetched) else report.number
        if (asked := self._asked.get(key)) is None:
            return
        asked.answers[report.rank] = report
        if len(asked.answers) < self._ranks:
            return
        del self._asked[key]
        self._silent = False
        arrived = isinstance(report, Fetched) and self._arrived(report.key, asked, prefixes)
        waited = list(asked.waiting)
        _let_go(asked.waiting, arrived=arrived)
        if asked.then is not None:
            asked.then()
        for sequence in waited:
            if not arrived and not sequence.finished:
                self.seek(sequence, prefixes)  # a shorter prefix may still be on disk

    def _arrived(self, key: str, asked: _Order, prefixes: PrefixIndex) -> bool:
        """Record that all ranks have answered a fetch; return True if all of them read the prefix."""
        answers: list[Fetched] = list(asked.answers.values())
        lost = {name for one in answers for name in one.lost}
        late, seconds = any(one.late for one in answers), max(one.seconds for one in answers)
        brought = sum(one.brought_bytes for one in answers)
        self.counts.read_bytes += sum(one.nbytes for one in answers)
        self.counts.brought_bytes += brought
        self.counts.read_s += seconds
        if not lost or late:
            came = [name for name in asked.names if name not in lost]
            blocks = sum(not is_checkpoint(name) for name in came)
            (self._bringing if brought else self._reading).measure(blocks * DISK_BLOCK_SIZE, seconds)
            self._lent.lose(came)  # the ranks have stored them on their own disks
        if lost:
            self.counts.failures += not late
            self._disk_blocks.lose(lost)
            prefixes.give_up(key)
        else:
            self.counts.hit_tokens += asked.gain
            prefixes.arrived(key)
        return not lost

    def lose_patience(self) -> None:
        """Stop waiting: compute the waiting prompts, and read nothing until disks respond. Late prefixes serve other prompts."""
        self._silent = True
        for asked in self._asked.values():
            _let_go(asked.waiting)

    def stores(self, keys: Iterable[str], prefixes: PrefixIndex) -> list[StoreOp]:
        """Return orders to write the disk blocks of these prefixes that are not on all disks yet."""
        return [StoreOp(key, missing) for key in keys if self._ranks and (missing := self.missing(prefixes.disk_names(key)))]

    def missing(self, names: Sequence[bytes], first: int = 0) -> list[tuple[int, bytes]]:
        """Return (number, name) of the disk blocks, from number `first` on, that are not on all disks. Checkpoints come last;
        they have the number of the block that they end."""
        return [
            (names.index(name[:NAME_BYTES]) if is_checkpoint(name) else number, name)
            for number, name in enumerate(names[first:], first)
            if not self.holds(name)
        ]

    def holds(self, name: bytes) -> bool:
        """Return True if all ranks have their part of this disk block on disk."""
        return name in self._disk_blocks

    def has(self, hashes: Sequence[bytes]) -> int:
        """Return the leading positions of a prompt with these block hashes that can be read from disk."""
        return len(self._usable(disk_block_names(hashes))) * DISK_BLOCK_SIZE

    def shares(self, sequence: Seeking) -> int:
        """Return the leading positions of a prompt whose blocks are on disk, with or without a checkpoint at their end."""
        names = disk_block_names(sequence.hashes(len(sequence.tokens))) if self.on and self.checkpoints else []
        return len(self._disk_blocks.leading(names)) * DISK_BLOCK_SIZE

    @property
    def positions(self) -> int:
        """KV positions on disk in blocks that every rank has its part of."""
        return len(self._disk_blocks) * DISK_BLOCK_SIZE


def _let_go(waiting: list[Seeking], *, arrived: bool = False) -> None:
    for sequence in waiting:
        sequence.awaits_kv = False
        sequence.fetched = sequence.fetched if arrived else 0
    waiting.clear()
