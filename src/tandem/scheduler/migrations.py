"""Migration of sequences to another replica: their KV is written to disk first.

Draining sequences migrate as soon as possible. Requests with `leaves` migrate when their prompt is computed, and their disk
blocks are written as they complete. All keep running here until their blocks are written. KV beyond the last whole block, or
not written, is recomputed on the other replica. States and windows are written where a sequence stands at the end of a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.kv.disk import DiskTier
from tandem.protocol.control import HandedOver
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, StoreOp, is_checkpoint
from tandem.scheduler.micro_batch import MicroBatch
from tandem.scheduler.sequence import Sequence

AT_ONCE = 1024 // DISK_BLOCK_SIZE
"""Maximum disk blocks queued for writing, since each takes memory until written."""


@dataclass
class _Migration:
    """Sequence that is going to migrate."""

    sequence: Sequence
    after: int = 0
    """Number of tokens after which it migrates; 0: as soon as possible."""
    names: list[bytes] | None = None
    """Names of its whole disk blocks and of a checkpoint; None until known. Disks may lose blocks again."""
    first: int = 0
    """Number of the first disk block that may be missing; earlier ones were on all disks."""
    ordered: set[bytes] = field(default_factory=set)
    """Names of disk blocks whose write was ordered and is unfinished."""

    @property
    def due(self) -> bool:
        """True if only writes of its disk blocks are pending."""
        return self.names is not None and len(self.sequence.tokens) > self.after


class Migrations:
    """Migrating sequences and their disk writes. Used only by the scheduler."""

    def __init__(self, disk: DiskTier, finish: Callable[[Sequence], None]) -> None:
        """Store the collaborators. `finish` ends a sequence on this replica."""
        self._disk, self._finish = disk, finish
        self._leaving: dict[str, _Migration] = {}

    def enter(self, sequence: Sequence) -> None:
        """Schedule the migration of a new sequence after its next token, if its request has `leaves` and it can migrate."""
        if sequence.request.leaves and self._can_leave(sequence):
            end = len(sequence.tokens) - (1 if self._disk.checkpoints else 0)  # a prompt is saved before its last token
            names = self._disk.names(sequence.hashes(end))
            self._leaving[sequence.request_id] = _Migration(sequence, len(sequence.tokens), names)

    def ask(self, sequence: Sequence) -> None:
        """Schedule the migration of a sequence, if it can migrate. It must finish here if its KV may not be written, it needs
        states of all positions, is a suspect, or ends with its prompt."""
        before = self._leaving.get(sequence.request_id)
        if self._can_leave(sequence) and (before is None or before.sequence is not sequence or before.after):
            self._leaving[sequence.request_id] = _Migration(sequence)
            sequence.departs = self._disk.checkpoints

    def _can_leave(self, sequence: Sequence) -> bool:
        request = sequence.request
        stays = sequence.whole or sequence.quarantine_record.suspect or request.pooling or request.warms or not request.on_disk
        return self._disk.on and not stays

    def __contains__(self, sequence: Sequence) -> bool:
        """Return True for a sequence that migrates after its prompt, with disk blocks written meanwhile."""
        migration = self._leaving.get(sequence.request_id)
        return migration is not None and migration.after > 0

    @property
    def progress(self) -> object:
        """Value that changes while disks write; None if no migration waits for them."""
        return [
            (one.sequence.request_id, len(self._missing(one)), len(one.ordered)) for one in self._leaving.values() if one.due
        ] or None

    def lose_patience(self) -> None:
        """Stop waiting for disks: draining sequences migrate with the blocks written, other sequences stay."""
        for request_id, migration in list(self._leaving.items()):
            if not migration.after:
                migration.names = []
            elif migration.due:
                del self._leaving[request_id]

    def forget(self) -> None:
        """Forget the ordered writes of lost ranks; sequences migrate later."""
        for migration in self._leaving.values():
            migration.ordered.clear()
            migration.names = migration.names if migration.after else None
            migration.first = 0

    def write(self, micro_batch: MicroBatch) -> list[StoreOp]:
        """Return the disk blocks to write with the micro-batch's next plan, for the earliest migrations first."""
        orders, room = [], AT_ONCE
        for migration in self._leaving.values():
            migration.ordered = {name for name in migration.ordered if not self._disk.holds(name)}
            room -= len(migration.ordered)
        for request_id, migration in self._leaving.items():
            sequence = migration.sequence
            if sequence.micro_batch != micro_batch.index:
                continue
            if migration.names is None:
                if room <= 0 or (self._disk.checkpoints and sequence.computed % DISK_BLOCK_SIZE):
                    continue  # its states can be written in the next step that begins at the end of a block
                migration.names = self._disk.names(sequence.hashes(sequence.computed))
            missing = [one for one in self._missing(migration) if one[1] not in migration.ordered]
            ready = [one for one in missing if _is_ready(*one, sequence.computed)]
            disk_blocks = [one for one in ready if is_checkpoint(one[1])]  # a step later it would be too late
            disk_blocks += ready[: max(room, 0)][: len(ready) - len(disk_blocks)]
            if disk_blocks:
                room -= len(disk_blocks)
                migration.ordered.update(name for _, name in disk_blocks)
                orders.append(StoreOp(request_id, disk_blocks, awaited=True))
        return orders

    def depart(self) -> list[HandedOver]:
        """End the sequences that can migrate now; return the messages for their apis."""
        gone = []
        for request_id, migration in list(self._leaving.items()):
            sequence = migration.sequence
            if sequence.finished or (migration.after and not self._disk.on):
                del self._leaving[request_id]
            elif self._may_go(migration):
                del self._leaving[request_id]
                gone.append(HandedOver(request_id, self._disk.has(sequence.hashes(len(sequence.tokens)))))
                self._finish(sequence)
        return gone

    def _may_go(self, migration: _Migration) -> bool:
        if migration.sequence.complete:
            return False  # its last token is being computed
        if not migration.after and migration.sequence.micro_batch is None:
            return True
        return migration.due and not self._missing(migration)

    def _missing(self, migration: _Migration) -> list[tuple[int, bytes]]:
        names = migration.names or []
        missing = self._disk.missing(names, migration.first)
        migration.first = missing[0][0] if missing else len(names)
        return missing


def _is_ready(number: int, name: bytes, computed: int) -> bool:
    """Return True if a sequence with `computed` positions can write a disk block, or the checkpoint at its end."""
    end = (number + 1) * DISK_BLOCK_SIZE
    return end == computed if is_checkpoint(name) else end <= computed
