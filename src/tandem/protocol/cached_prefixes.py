"""Messages about an engine's cached prefixes, in memory and on disk."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MOST_PREFIXES = 1000
"""Prefixes that a report names."""


class QueryCache(Struct, frozen=True, tag=True):
    """Ask for a `CacheReport`."""

    query_id: int
    tokens: list[int] = []
    """Prompt whose cached length the report shows."""
    drop: Literal["", "memory", "all"] = ""
    """Drop prefixes before the report is made: those in memory, or those on disk too."""


class CachedPrefixState(Struct, frozen=True):
    """One prefix in memory."""

    tokens: int
    disk_tokens: int
    """Leading tokens that are also on disk."""
    hits: int
    """Requests that it has served."""


class DiskReport(Struct, frozen=True):
    """KV on the disks of an engine's ranks."""

    directory: str
    limit_bytes: int
    """Upper bound of one machine's directory."""
    tokens: int
    """Positions of prefixes that every rank has its part of."""
    bytes: int
    """Files of this model, adapter and type, over all machines."""
    total_bytes: int
    """All files there: of other models too."""
    machines: int
    hit_tokens: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    failures: int = 0


class CacheReport(Struct, frozen=True, tag=True):
    """Prefixes of one engine."""

    query_id: int
    trouble: str = ""
    """Reason why the report is empty, or nothing was dropped."""
    serves: str = ""
    """Equal to `EngineStatus.prefix_cache`."""
    kv_disk: str = ""
    """Equal to `EngineStatus.kv_disk`."""
    prefixes: list[CachedPrefixState] = []
    """The most recently used first, at most `MOST_PREFIXES`."""
    count: int = 0
    """Number of cached prefixes."""
    tokens: int = 0
    """Positions in memory."""
    limit_tokens: int = 0
    nbytes: int = 0
    """Bytes in the memory of all ranks."""
    queries: int = 0
    hits: int = 0
    hit_tokens: int = 0
    """Prompt tokens that were taken from memory in place of being computed."""
    disk: DiskReport | None = None
    """None where nothing is kept on disk."""
    memory_has: int = 0
    """Tokens of the prompt that are cached in memory."""
    disk_has: int = 0
    """Tokens of the prompt that are cached on disk."""
    dropped_tokens: int = 0
    """Positions dropped from memory."""
    dropped_bytes: int = 0
    """Bytes deleted from disks."""
