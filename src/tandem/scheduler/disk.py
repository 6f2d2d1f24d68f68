"""Prefixes on the ranks' disks: which are fetched into memory, and who waits for that.

The engine decides here; ranks read and write in threads of their own. A prefix that has been fetched is one in memory
like others (`tandem.cache.prefix`). What cannot be read is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from tandem.cache.pieces import PieceIndex, piece_names
from tandem.cache.prefix import BLOCK, PrefixIndex, block_hashes
from tandem.protocol.pieces import PIECE, Borrow, Fetch, Fetched, StoreOp, Survey, Surveyed, Written
from tandem.scheduler.sequence import Sequence as Running

NEAR = 2048
"""Positions that are near the beginning of a prompt."""
OLD = 0.8
"""Weight of what was measured before."""
SLOWER = 4.0
"""How many times as long as computing it a prompt may take to read that another replica has computed for this one."""
AGAIN = 64
"""Every so many times that reading does not pay it is tried all the same: paces change."""
GUESS, LENT_GUESS = 0.5, 0.25
"""Share of the time to compute a prompt that reading it saves, and bringing it from another machine, until both were
measured."""


@dataclass
class Pace:
    """Tokens a second, lately."""

    tokens_s: float = 0.0
    seen: int = 0
    """Tokens that this was measured with."""

    def measure(self, tokens: int, seconds: float) -> None:
        """So many took so long."""
        if tokens > 0 and seconds > 0:
            now = tokens / seconds
            self.seen += tokens
            self.tokens_s = OLD * self.tokens_s + (1 - OLD) * now if self.tokens_s else now


@dataclass
class DiskCounts:
    """What happened so far."""

    hit_tokens: int = 0
    """Positions that were read in place of being computed."""
    read_bytes: int = 0
    written_bytes: int = 0
    read_s: float = 0.0
    written_s: float = 0.0
    failures: int = 0
    """Prefixes that could not be read."""
    brought_bytes: int = 0
    """Of files that came from other machines."""


@dataclass
class _Fetching:
    names: list[bytes]
    gain: int
    """Positions beyond what was in memory."""
    missing: set[int]
    """Ranks that have not answered."""
    lost: list[bytes] = field(default_factory=list)
    waiting: list[Running] = field(default_factory=list)
    seconds: float = 0.0
    brought: bool = False
    """Some of it came from other machines."""
    late: bool = False
    """It came too slowly."""


@dataclass
class _Looking:
    missing: set[int]
    """Ranks that have not answered."""
    waiting: list[Running]
    wanted: frozenset[bytes] | None
    """Pieces that ranks look for; None: all."""


class DiskTier:
    """Used by the scheduler alone."""

    def __init__(self) -> None:
        self.orders: list[Fetch | Borrow | Survey] = []
        """For all ranks, before the next plan; whoever sends them empties the list."""
        self.counts = DiskCounts()
        self.computing = Pace()
        """Of prompts."""
        self.beginning = Pace()
        """The same near the beginnings of prompts: alike for replicas that get short ones and those that get long ones,
        of which positions far behind take longer."""
        self._reading, self._bringing = Pace(), Pace()
        """Of what is on the ranks' own disks, and of what others lend."""
        self._too_slow = 0
        """Times that reading did not pay."""
        self._pieces = PieceIndex()
        self._lent: dict[int, set[bytes]] = {}
        """Pieces for which a rank needs what others lend, as it last saw."""
        self._ranks = 0
        self._fetching: dict[str, _Fetching] = {}
        self._looks: dict[int, _Looking] = {}
        """By number, which is negative: the others are somebody else's."""
        self._looked = 0
        self._silent = False
        """Nobody asks until all ranks have answered something."""

    @property
    def fetching(self) -> str | None:
        """What somebody waits for, a look or the prefix with this key that was asked for first."""
        looks = (f"look {number}" for number, look in self._looks.items() if look.waiting)
        return next(looks, next((key for key, fetching in self._fetching.items() if fetching.waiting), None))

    @property
    def on(self) -> bool:
        """All ranks keep pieces on disk, and answer."""
        return self._ranks > 0 and not self._silent

    @property
    def saves(self) -> float:
        """Share of the time to compute a prompt that reading it saves; a guess until both were measured."""
        return self._saved(self._reading, GUESS)

    @property
    def lent_saves(self) -> float:
        """The same of bringing it from other machines."""
        return self._saved(self._bringing, LENT_GUESS)

    def _saved(self, pace: Pace, guess: float) -> float:
        if not (pace.tokens_s and self.computing.tokens_s):
            return guess if self.on else 0.0
        return max(0.0, 1.0 - self.computing.tokens_s / pace.tokens_s)

    def computed(self, count: int, longest: int, seconds: float) -> None:
        """A step of prompts alone took so long: `count` tokens, each before position `longest`."""
        self.computing.measure(count, seconds)
        if longest <= NEAR:
            self.beginning.measure(count, seconds)

    def begin(self, kept: Iterable[list[bytes] | None], waiting: Iterable[Running], prefixes: PrefixIndex,
              lenders: Iterable[tuple[str, str]] = ()) -> None:
        """New ranks, and the pieces that each has on its disk; None from one that keeps none there. `lenders` have them
        for ranks with other disks: which directory, and where."""
        names, others = list(kept), dict(lenders)
        self.reset([] if None in names else [one or [] for one in names])
        if self._ranks and len(others) > 1:
            self.orders.append(Borrow(list(others.items())))
            self._look_for(*waiting)
            return
        for sequence in waiting:
            self.seek(sequence, prefixes)

    def lend(self, lenders: Iterable[tuple[str, str]]) -> None:
        """Others lend now: have the ranks look what. Nobody waits for that."""
        if self._ranks:
            self._looked -= 1
            self.orders += [Borrow(list(dict(lenders).items())), Survey(self._looked, soon=True)]

    def reset(self, kept: Sequence[Iterable[bytes]] = ()) -> None:
        """The ranks are gone; what they were asked for does not come any more."""
        for waiting in self._waiting():
            _let_go(waiting)
        self._fetching.clear()
        self._looks.clear()
        self._silent = False
        self.orders.clear()
        self._ranks = len(kept)
        self._pieces.reset(kept)
        self._lent.clear()

    def seek(self, sequence: Running, prefixes: PrefixIndex) -> None:
        """Have the longest prefix of a waiting sequence fetched, if there is more of it on disk than in memory, and
        reading takes less time than computing, as far as is known."""
        sequence.fetched = 0
        told = not sequence.looked and sequence.request.kept >= PIECE and self._ranks > 0
        if self._silent or not (self._pieces or told or self._looks) or sequence.whole or sequence.suspicion.suspect:
            return
        hashes = block_hashes(sequence.tokens[:-1])
        every = piece_names(hashes)
        names = self._pieces.leading(every)
        if told and len(names) < min(sequence.request.kept // PIECE, len(every)):
            self._look_for(sequence, wanted=every)
            return
        if len(names) < len(every) and not sequence.looked:
            for look in reversed(self._looks.values()):
                if look.wanted is None or every[len(names)] in look.wanted:
                    look.waiting.append(sequence)
                    sequence.awaits = sequence.looked = True
                    return
        here = prefixes.peek(hashes)
        # What came from another replica is read whatever the pace: it came so that this one need not compute it.
        came = sequence.request.kept >= PIECE and bool(sequence.request.produced)
        names = next((some for some in (names, self._own(names)) if len(some) * PIECE - here >= PIECE
                      and (came or self._pays(some, len(some) * PIECE - here))), [])
        if not names:
            return
        gain = len(names) * PIECE - here
        for fetching in self._fetching.values():
            if fetching.names[:len(names)] == names:
                break
        else:
            key = prefixes.reserve(hashes[:len(names) * PIECE // BLOCK])
            if key is None:
                return
            # One that came would hold up others, were it computed here.
            within_s = (SLOWER if came else 1.0) * gain / self.computing.tokens_s if self.computing.tokens_s else 0.0
            self.orders.append(Fetch(key, names, within_s))
            fetching = self._fetching[key] = _Fetching(names, gain, set(range(self._ranks)))
        fetching.waiting.append(sequence)
        sequence.awaits, sequence.fetched = True, gain

    def _look_for(self, *sequences: Running, wanted: list[bytes] | None = None) -> None:
        """Others may have written the beginnings of these: see what is there before they are sought again. `wanted`:
        their pieces, if nothing else is looked for."""
        self._looked -= 1
        self.orders.append(Survey(self._looked, soon=True, wanted=wanted))
        self._looks[self._looked] = _Looking(set(range(self._ranks)), list(sequences),
                                             None if wanted is None else frozenset(wanted))
        for sequence in sequences:
            sequence.awaits = sequence.looked = True

    def discard(self, hashes: Sequence[bytes]) -> None:
        """Have the ranks delete the pieces of a prompt with these blocks, once those that wait have been written."""
        if self._ranks and (names := piece_names(hashes)):
            self._pieces.lose(names)
            self._looked -= 1
            self.orders.append(Survey(self._looked, drop=True, wanted=names))

    def _own(self, names: list[bytes]) -> list[bytes]:
        """Those before the first that somebody lends."""
        return list(takewhile(lambda name: not any(name in held for held in self._lent.values()), names))

    def _pays(self, names: list[bytes], gain: int) -> bool:
        pace = self._reading if len(self._own(names)) == len(names) else self._bringing
        if not (pace.tokens_s and self.computing.tokens_s):
            return True
        if len(names) * PIECE / pace.tokens_s < gain / self.computing.tokens_s:
            return True
        self._too_slow += 1
        return self._too_slow % AGAIN == 0

    def take(self, report: Fetched | Written | Surveyed, prefixes: PrefixIndex) -> None:
        """What a rank has read, written or seen."""
        if isinstance(report, Fetched):
            self._fetched(report, prefixes)
            return
        if isinstance(report, Surveyed):
            self._pieces.see(report.rank, report.names, report.wanted)
            before = set() if report.wanted is None else self._lent.get(report.rank, set()).difference(report.wanted)
            self._lent[report.rank] = before.union(report.lent)
            self._seen(report, prefixes)
            return
        self._pieces.keep(report.rank, report.names)
        self._pieces.lose(report.gone)
        self.counts.written_bytes += report.nbytes
        self.counts.written_s += report.seconds

    def _seen(self, report: Surveyed, prefixes: PrefixIndex) -> None:
        look = self._looks.get(report.number)
        if look is None:
            return
        look.missing.discard(report.rank)
        if not look.missing:
            del self._looks[report.number]
            self._silent = False
            for sequence in look.waiting:
                sequence.awaits = False
                if not sequence.finished:
                    self.seek(sequence, prefixes)

    def _fetched(self, report: Fetched, prefixes: PrefixIndex) -> None:
        """With the last rank's answer the prefix is in memory, or given up."""
        fetching = self._fetching.get(report.key)
        if fetching is None:
            return
        fetching.missing.discard(report.rank)
        fetching.lost += report.lost
        fetching.seconds = max(fetching.seconds, report.seconds)
        self.counts.read_bytes += report.nbytes
        self.counts.brought_bytes += report.brought_bytes
        fetching.brought |= report.brought_bytes > 0
        fetching.late |= report.late
        if fetching.missing:
            return
        del self._fetching[report.key]
        self._silent = False
        self.counts.read_s += fetching.seconds
        came = [name for name in fetching.names if name not in fetching.lost]
        if not fetching.lost or fetching.late:
            pace = self._bringing if fetching.brought else self._reading
            pace.measure(len(came) * PIECE, fetching.seconds)
            for lent in self._lent.values():
                lent.difference_update(came)  # the ranks have kept it
        if fetching.lost:
            self.counts.failures += not fetching.late
            self._pieces.lose(fetching.lost)
            prefixes.give_up(report.key)
        else:
            self.counts.hit_tokens += fetching.gain
            prefixes.arrived(report.key)
        waited = list(fetching.waiting)
        _let_go(fetching.waiting, arrived=not fetching.lost)
        for sequence in waited if fetching.lost else ():
            if not sequence.finished:
                self.seek(sequence, prefixes)  # what comes before it may be there still

    def lose_patience(self) -> None:
        """Whoever waits is computed instead, and so is all else until disks answer; what comes then is for others."""
        self._silent = True
        for waiting in self._waiting():
            _let_go(waiting)

    def _waiting(self) -> Iterator[list[Running]]:
        yield from (fetching.waiting for fetching in self._fetching.values())
        yield from (look.waiting for look in self._looks.values())

    def stores(self, keys: Iterable[str], prefixes: PrefixIndex) -> list[StoreOp]:
        """Which pieces of these prefixes are not on all disks yet."""
        if not self._ranks:
            return []
        found = []
        for key in keys:
            names = piece_names(prefixes.hashes(key))
            if missing := [(i, name) for i, name in enumerate(names) if name not in self._pieces]:
                found.append(StoreOp(key, missing))
        return found

    def holds(self, name: bytes) -> bool:
        """All ranks have their part of this piece there."""
        return name in self._pieces

    def has(self, hashes: Sequence[bytes]) -> int:
        """Positions of a prompt with these blocks that lie on the disks, from its beginning."""
        return len(self._pieces.leading(piece_names(hashes))) * PIECE

    @property
    def positions(self) -> int:
        """All that lie there, in pieces that every rank has its part of."""
        return len(self._pieces) * PIECE


def _let_go(waiting: list[Running], *, arrived: bool = False) -> None:
    for sequence in waiting:
        sequence.awaits = False
        sequence.fetched = sequence.fetched if arrived else 0
    waiting.clear()
