"""What Tandem keeps of models for the next start: slices from other machines, headers, converted GGUF files."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.env import cache_dir

KINDS = {"slices": "*", "headers": "*/*", "gguf": "*"}
"""Each kind's directory in the cache, and where its entries are in it."""


@dataclass(frozen=True)
class Kept:
    """One entry."""

    path: Path
    kind: str
    nbytes: int
    unused_s: float
    """Seconds since a start has needed it."""


_held: dict[Path, int] = {}
"""Entries that this process uses, each locked until it ends."""


def used(path: Path) -> None:
    """Note that this process needs the entry: now, and until it ends."""
    with suppress(OSError):
        if path not in _held:
            _held[path] = in_use_by_us(path)
        os.utime(path)  # last: it fails where somebody else owns the entry


def in_use_by_us(path: Path) -> int:
    """A descriptor; until it is closed the entry is not pruned. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return descriptor


def kept() -> Iterator[Kept]:
    """All entries, also what interrupted starts have left."""
    for kind, pattern in KINDS.items():
        for path in sorted((cache_dir() / kind).glob(pattern)):
            with suppress(OSError):
                files = [one.lstat() for one in (path, *path.rglob("*"))]
                yield Kept(path, kind, sum(one.st_blocks * 512 for one in files), time.time() - path.stat().st_mtime)


def unused(unused_s: float) -> Iterator[Kept]:
    """Entries that no start has needed for so long, and that no process uses."""
    return (one for one in kept() if one.unused_s >= unused_s and not in_use(one.path))


def prune(unused_s: float) -> Iterator[Kept]:
    """Remove those of `unused`; yields each when it is gone.

    Whoever needs one again fetches or converts it again. Raises OSError.
    """
    for one in unused(unused_s):
        shutil.rmtree(one.path) if one.path.is_dir() else one.path.unlink()
        yield one


def in_use(path: Path) -> bool:
    """A process that runs needs it."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(descriptor)
    return False
