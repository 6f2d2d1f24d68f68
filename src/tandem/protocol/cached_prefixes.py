"""Messages about an engine's cached prefixes, in memory and on disk."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

MOST_PREFIXES = 1000
"""Most prefixes listed in one `CacheReport`."""


class QueryCache(Struct, frozen=True, tag=True):
    """Ask for a `CacheReport`."""

    query_id: int
    tokens: list[int] = []
    """Prompt token ids whose cached length the report shows."""
    drop: Literal["", "memory", "all"] = ""
    """Drop cached prefixes before reporting: from `memory`, or from memory and disk (`all`)."""


class CachedPrefixState(Struct, frozen=True):
    """Entry of `CacheReport`: one prefix in memory."""

    tokens: int
    disk_tokens: int
    """Leading tokens that are also on disk."""
    hits: int
    """Requests that reused this prefix."""


class DiskReport(Struct, frozen=True):
    """State of the disk cache of an engine's ranks."""

    directory: str
    limit_bytes: int
    """Size limit of the directory on each machine."""
    tokens: int
    """KV positions on disk that every rank has its part of."""
    bytes: int
    """Bytes of files for this model, adapter and KV type, over all machines."""
    total_bytes: int
    """Bytes of all files in the directories, including other models' files."""
    machines: int
    hit_tokens: int = 0
    read_bytes: int = 0
    read_s: float = 0.0
    written_bytes: int = 0
    failures: int = 0


class CacheReport(Struct, frozen=True, tag=True):
    """Prefix cache of one engine, in memory and on disk."""

    query_id: int
    trouble: str = ""
    """Reason why the report is empty or nothing was dropped; empty if neither."""
    serves: str = ""
    """Equal to `EngineStatus.prefix_cache`."""
    kv_disk: str = ""
    """Equal to `EngineStatus.kv_disk`."""
    prefixes: list[CachedPrefixState] = []
    """Cached prefixes, most recently used first, at most `MOST_PREFIXES`."""
    count: int = 0
    """Number of cached prefixes."""
    tokens: int = 0
    """KV positions in memory."""
    limit_tokens: int = 0
    nbytes: int = 0
    """Bytes of cached prefixes in the memory of all ranks."""
    queries: int = 0
    hits: int = 0
    hit_tokens: int = 0
    """Prompt tokens whose KV came from memory instead of being computed."""
    disk: DiskReport | None = None
    """State of the disk cache; None without one."""
    memory_has: int = 0
    """Leading tokens of `QueryCache.tokens` that are cached in memory."""
    disk_has: int = 0
    """Leading tokens of `QueryCache.tokens` that are cached on disk."""
    dropped_tokens: int = 0
    """KV positions dropped from memory."""
    dropped_bytes: int = 0
    """Bytes deleted from disks."""
