"""Messages about the disk blocks of prefixes: orders of the engine, reports of ranks.

A disk block is the KV of `DISK_BLOCK_SIZE` consecutive positions, starting at a multiple of that. Its name is the hash of all
tokens up to its end. Equal names therefore mean equal KV, wherever computed.
"""

from __future__ import annotations

from msgspec import Struct

BLOCK_SIZE = 32
"""Positions per KV block. Prefixes are looked up by the hashes of their blocks; shorter ones are not cached."""
DISK_BLOCK_SIZE = 2 * BLOCK_SIZE
"""Positions per disk block: a fixed run of KV blocks. One file per KV block writes a third and reads a fifth more slowly.
Positions after a prompt's last whole disk block are recomputed."""
NAME_BYTES = 16
"""Bytes of a block's hash, the name of a disk block."""


def checkpoint_name(disk_block: bytes) -> bytes:
    """Return the name of the checkpoint at the end of the disk block with this name: what layers without disk blocks hold
    there, such as recurrent states and sliding windows."""
    return disk_block + b"\0"


def is_checkpoint(name: bytes) -> bool:
    """Return True for names made by `checkpoint_name`."""
    return len(name) > NAME_BYTES


class StoreOp(Struct, frozen=True, array_like=True):
    """Write disk blocks and checkpoints of a cached prefix when the rank has time."""

    key: str
    disk_blocks: list[tuple[int, bytes]]
    """(Index within the prefix, name) of each disk block; a checkpoint has the index of the block that ends there."""
    awaited: bool = False
    """True if a migration waits for the write."""


class Fetch(Struct, frozen=True, tag=True):
    """Read a prefix from disk, block by block, for a later plan that restores or evicts `key`."""

    key: str
    names: list[bytes]
    """Disk blocks, then the checkpoint at their end if the model has any."""
    within_s: float = 0.0
    """Time limit of the whole fetch in seconds; if exceeded, the rest is computed. 0: no limit."""


class UseRemoteStores(Struct, frozen=True, tag=True):
    """Fetch blocks missing on a rank's own disk from these remote stores. The supervisor sends them to the engine for other
    replicas, the engine to its ranks."""

    remote_stores: list[tuple[str, str]]
    """(Directory id as in `Ready.store`, endpoint) of each remote store."""


class Survey(Struct, frozen=True, tag=True):
    """List the disk blocks after all queued writes, including blocks that other processes wrote."""

    number: int
    drop: bool = False
    """Delete blocks before listing: the `wanted` ones, or all of this model, adapter and type, whichever process wrote them."""
    soon: bool = False
    """True to list before queued writes are done."""
    wanted: list[bytes] | None = None
    """Disk blocks to look for, on the own disk and in remote stores; None: all."""


class Surveyed(Struct, frozen=True, tag=True):
    """Answer of a rank to `Survey`."""

    rank: int
    number: int
    names: list[bytes]
    """Listed blocks that the rank can assemble."""
    lent: list[bytes] = []
    """Subset of `names` that needs files from other machines."""
    nbytes: int = 0
    """Bytes of the files of this model, adapter and type, or of the deleted ones. 0, like `total_bytes`, if `wanted` limited
    the survey."""
    total_bytes: int = 0
    """Bytes of all files in the directory."""
    wanted: list[bytes] | None = None
    """Copy of `Survey.wanted`."""


class Fetched(Struct, frozen=True, tag=True):
    """Report that a rank has read a prefix, or failed to."""

    rank: int
    key: str
    lost: list[bytes] = []
    """Disk blocks from the first missing or incomplete one on. If any, the prefix cannot be restored."""
    seconds: float = 0.0
    nbytes: int = 0
    brought_bytes: int = 0
    """Bytes fetched from other machines."""
    late: bool = False
    """True if the transfer exceeded its time limit; files received until then stay on this rank's disk."""


class Written(Struct, frozen=True, tag=True):
    """Report that a rank has written disk blocks."""

    rank: int
    names: list[bytes]
    nbytes: int = 0
    seconds: float = 0.0
    """Seconds of writing, after the KV was computed."""
    gone: list[bytes] = []
    """Other disk blocks deleted meanwhile, wholly or partly."""
