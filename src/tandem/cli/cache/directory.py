"""A directory of `--kv-disk`, looked at without a server."""

from __future__ import annotations

import stat
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tandem.errors import UsageError
from tandem.protocol.pieces import PIECE
from tandem.runner.piece_files import ABOUT, MARK
from tandem.system.files import read_text

_MOST_NAME = 4096
"""Bytes of a model's name; what has more is none of ours."""


@dataclass
class Space:
    """Pieces of one model, adapter and type, made by one version."""

    name: str
    """Of its directory."""
    model: str
    """What the model was called; empty where nobody has noted it."""
    tokens: int = 0
    """Positions in its pieces, whether or not all parts of them are there."""
    files: int = 0
    nbytes: int = 0
    used: float = 0.0
    """When something of it was used last, in seconds since 1970."""

    @property
    def type(self) -> str:
        """What it was computed in."""
        return self.name.rpartition("-")[2]


def look(directory: Path) -> list[Space]:
    """What is there, the most recently used first. Raises UsageError."""
    found = []
    for place in _spaces(directory):
        space, names = Space(place.name, _model(place)), set()
        for path, size, used in _files(place):
            names.add(path.name.partition(".")[0])
            space.files, space.nbytes, space.used = space.files + 1, space.nbytes + size, max(space.used, used)
        space.tokens = PIECE * len(names)
        if names:
            found.append(space)
    return sorted(found, key=lambda one: -one.used)


def clear(directory: Path, unused_s: float = 0.0) -> tuple[int, int]:
    """Delete the pieces that nobody has used for so long; returns how many files and bytes. Raises UsageError."""
    count = nbytes = 0
    now = time.time()
    for place in _spaces(directory):
        for path, size, used in _files(place):
            if now - used >= unused_s:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise UsageError(f"--kv-disk {directory}: {path.name} cannot be deleted: {error.strerror}",
                                     param="kv_disk") from error
                count, nbytes = count + 1, nbytes + size
    return count, nbytes


def _spaces(directory: Path) -> list[Path]:
    if not (directory / MARK).is_file():
        what = "is no directory that Tandem keeps KV in" if directory.exists() else "there is no such directory"
        raise UsageError(f"--kv-disk {directory}: {what}; name the one that a server has", param="kv_disk")
    try:
        return sorted(one for one in directory.iterdir() if one.is_dir() and not one.is_symlink())
    except OSError as error:
        raise UsageError(f"--kv-disk {directory}: cannot be read: {error.strerror}", param="kv_disk") from error


def _files(place: Path) -> list[tuple[Path, int, float]]:
    """Pieces with their sizes, and when they were used."""
    found = []
    with suppress(OSError):
        for path in place.glob("*.kv"):
            with suppress(OSError):  # a server may delete it just now
                status = path.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append((path, status.st_size, status.st_mtime))
    return found


def _model(place: Path) -> str:
    with suppress(OSError, UnicodeDecodeError):
        name = read_text(place / ABOUT, _MOST_NAME)
        return name if name.isprintable() else ""
    return ""
