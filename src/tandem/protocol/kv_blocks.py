"""Disk blocks of prefixes that ranks keep on disk: what the engine orders, and what ranks report.

A disk block is the KV of `DISK_BLOCK_SIZE` positions in a row, beginning at a multiple of that. Its name is the hash of
all tokens up to its end, so the same name means the same KV wherever it was computed.
"""

from __future__ import annotations

from msgspec import Struct

BLOCK_SIZE = 32
"""Positions of a block of KV: prefixes are found by the hashes of their blocks. None shorter is kept."""
DISK_BLOCK_SIZE = 2 * BLOCK_SIZE
"""Positions of a disk block, which is a fixed run of blocks: files of single blocks are written a third more slowly,
and read a fifth. What a prompt has behind its last whole disk block is computed again."""


class StoreOp(Struct, frozen=True, array_like=True):
    """Write disk blocks of a cached prefix to disk, when there is time."""

    key: str
    disk_blocks: list[tuple[int, bytes]]
    """Number of each disk block within the prefix, and its name."""
    awaited: bool = False
    """True if a migration waits for the write."""


class Fetch(Struct, frozen=True, tag=True):
    """Read a prefix from disk, disk block after disk block, for a plan to come that restores or evicts `key`."""

    key: str
    names: list[bytes]
    within_s: float = 0.0
    """Seconds that the whole fetch may take; if it is slower the rest is computed. 0: no limit."""


class UseRemoteStores(Struct, frozen=True, tag=True):
    """From now on, what a rank has not on its own disk may be had from others: the supervisor tells the engine of those
    of the model's other replicas, and the engine its ranks."""

    remote_stores: list[tuple[str, str]]
    """Which directory each has (`Ready.store`), and its endpoint."""


class Survey(Struct, frozen=True, tag=True):
    """List the blocks on disk after all queued writes, including those that others wrote."""

    number: int
    drop: bool = False
    """Delete the disk blocks of this model, adapter and type first, or those that are `wanted`, whoever wrote them."""
    soon: bool = False
    """True to look before queued writes are done."""
    wanted: list[bytes] | None = None
    """Disk blocks to look for, here and at those who lend; None: all."""


class Surveyed(Struct, frozen=True, tag=True):
    """What a rank has seen there."""

    rank: int
    number: int
    names: list[bytes]
    """Blocks that the rank can assemble, apart from those that were not asked for."""
    lent: list[bytes] = []
    """Subset of `names` that needs files of other machines."""
    nbytes: int = 0
    """Bytes of the files of this model, adapter and type, or of the deleted ones. 0, as is `total_bytes`, if only some
    disk blocks were asked for."""
    total_bytes: int = 0
    """Bytes of all files in the directory."""
    wanted: list[bytes] | None = None
    """Value of the question."""


class Fetched(Struct, frozen=True, tag=True):
    """A rank has read a prefix, or could not."""

    rank: int
    key: str
    lost: list[bytes] = []
    """From the first disk block that is not there any more, or not whole; then the prefix cannot be restored."""
    seconds: float = 0.0
    nbytes: int = 0
    brought_bytes: int = 0
    """Bytes fetched from other machines."""
    late: bool = False
    """True if the transfer was too slow; files that came are on this rank's disk."""


class Written(Struct, frozen=True, tag=True):
    """A rank has written disk blocks to disk."""

    rank: int
    names: list[bytes]
    nbytes: int = 0
    seconds: float = 0.0
    """What that took, once it was computed."""
    gone: list[bytes] = []
    """Others that were deleted meanwhile, wholly or in part."""
