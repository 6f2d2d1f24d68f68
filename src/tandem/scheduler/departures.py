"""Sequences that go on at another replica: what is computed of them is written to disk before they leave.

One leaves after the other, and goes on here until its pieces are written. What is beyond its last whole piece, and what
could not be written, is computed again where it goes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.cache.pieces import piece_names
from tandem.cache.prefix import block_hashes
from tandem.protocol.control import HandedOver
from tandem.protocol.pieces import StoreOp
from tandem.scheduler.disk import DiskTier
from tandem.scheduler.lane import Lane
from tandem.scheduler.sequence import Sequence

AT_ONCE = 4
"""Pieces that ranks are told to write before those have been written: what waits there takes memory."""


@dataclass
class _Parting:
    """Who leaves next, once it is known what has to be written."""

    sequence: Sequence
    names: list[bytes]
    """All of its whole pieces."""
    ordered: set[bytes] = field(default_factory=set)


class Departures:
    """Used by the scheduler alone."""

    def __init__(self, disk: DiskTier, finish: Callable[[Sequence], None]) -> None:
        """`finish` ends a sequence here."""
        self._disk, self._finish = disk, finish
        self._leaving: deque[Sequence] = deque()
        self._parting: _Parting | None = None
        self._impatient = False

    def ask(self, sequence: Sequence) -> None:
        """Have it leave, unless it has to be finished here: what may not be written, needs states of all positions, is
        on trial, or ends with its prompt."""
        request = sequence.request
        stays = (sequence.whole or sequence.suspicion.suspect or request.pooling or request.warms
                 or not request.on_disk or sequence in self._leaving)
        if self._disk.on and not stays:
            self._leaving.append(sequence)

    @property
    def progress(self) -> object:
        """Changes as long as disks write; None when nobody waits for them."""
        parting = self._parting
        return parting and (parting.sequence.request_id, len(self._missing(parting)), len(parting.ordered))

    def lose_patience(self) -> None:
        """The disks say nothing: whoever leaves does so with what they have."""
        self._impatient = True

    def forget(self) -> None:
        """The ranks are gone; whoever was about to leave does so at the next look."""
        self._parting = None

    def write(self, lane: Lane) -> list[StoreOp]:
        """What ranks have to write at the end of the lane's next plan, of the next one who leaves."""
        if not self._leaving or self._leaving[0].lane != lane.index:
            return []
        sequence = self._leaving[0]
        if self._parting is None:
            known = sequence.tokens[:min(len(sequence.tokens), sequence.computed)]
            self._parting = _Parting(sequence, piece_names(block_hashes(known)))
        ordered, missing = self._parting.ordered, self._missing(self._parting)
        under_way = sum(name in ordered for _, name in missing)
        pieces = [one for one in missing if one[1] not in ordered][:AT_ONCE - under_way]
        ordered.update(name for _, name in pieces)
        return [StoreOp(sequence.request_id, pieces)] if pieces else []

    def depart(self) -> list[HandedOver]:
        """Let those go who can; whoever has ended here meanwhile does not leave."""
        gone = []
        while self._leaving:
            sequence, parting = self._leaving[0], self._parting
            if sequence.finished:
                self._leaving.popleft()
                self._parting = None
                continue
            writes = parting is None or self._missing(parting)
            if sequence.complete or (sequence.lane is not None and writes and not self._impatient):
                break  # its last token is under way, or a piece of it
            self._leaving.popleft()
            self._parting = None
            gone.append(HandedOver(sequence.request_id, self._disk.has(block_hashes(sequence.tokens))))
            self._finish(sequence)
        return gone

    def _missing(self, parting: _Parting) -> list[tuple[int, bytes]]:
        return [(number, name) for number, name in enumerate(parting.names) if not self._disk.holds(name)]
