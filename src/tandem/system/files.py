"""Reading of regular files only, writing of files private to this user, and explanations of errors when opening files."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from tandem.errors import UsageError

WITHHELD = (
    "macOS withholds this folder from programs that were started over ssh, or by an app without permission: "
    "move the model out of Documents, Desktop, Downloads and external volumes, or allow it (System Settings, "
    "General, Sharing, Remote Login, Allow full disk access for remote users; for an app: Privacy & Security, "
    "Full Disk Access)"
)

WITHHELD_FOLDERS = ("Documents", "Desktop", "Downloads", "Library/Mobile Documents", "Library/CloudStorage")
"""Folders in a home directory that macOS's privacy rules protect, the last two iCloud's. /Volumes is protected too."""

BY_HAND = 16 << 20
"""Most bytes read from a file that people write by hand."""


class NotRegular(OSError):
    """The file is not regular or is too large. `strerror` names the remedy."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


@contextlib.contextmanager
def file_errors(what: str, remedy: str = "", *, param: str | None = None, kind: type[UsageError] = UsageError) -> Iterator[None]:
    """Raise the block's OSError or UnicodeDecodeError as `kind`: `what`, such as `FILE: cannot be read`, the reason, and the
    `remedy`."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror or error) if isinstance(error, OSError) else "not UTF-8 text"
        raise kind(f"{what}: {why}{remedy and '; '}{remedy}", param=param) from None


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """Open a file for reading bytes, with `flags` in addition. Raises OSError, and NotRegular for any other kind of file.

    Reading a pipe could block forever, and a device may have no end.
    """
    file = open(  # noqa: SIM115 - the caller closes it
        path, "rb", opener=lambda name, usual: os.open(name, usual | flags | os.O_NONBLOCK)
    )
    mode = os.fstat(file.fileno()).st_mode
    if not stat.S_ISREG(mode):
        file.close()
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a device"
        raise NotRegular(path, f"it is {kind}; give a file")
    return file


def read_regular(path: str | Path, most: int) -> bytes:
    """Return the content of a file of at most `most` bytes. Raises OSError, NotRegular for a larger or non-regular file."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotRegular(path, f"it has more than {most >> 20 or 1} MiB; give another file")
        return file.read(size or most)  # kernel files such as those in /proc report size 0


def read_text(path: str | Path, most: int = BY_HAND) -> str:
    """Return a file of at most `most` bytes as text in UTF-8, lines ended by `\\n`. Raises OSError, NotRegular,
    UnicodeDecodeError."""
    return read_regular(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def open_private(path: str | Path, mode: str) -> BinaryIO:
    """Open a file; if it is created, only this user can access it (mode 0600). Raises OSError."""
    return open(
        path,
        mode,
        opener=lambda name, flags: os.open(  # type: ignore[return-value]
            name, flags | os.O_CLOEXEC, 0o600
        ),
    )


def write_private(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace a file atomically with one that only this user can access (mode 0600). Raises OSError.

    With `sync`, it survives a power failure.
    """
    temporary = path.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)  # a leftover file would keep its mode
        with open_private(temporary, "wb") as file:
            file.write(content)
        place_file(temporary, path, sync=sync)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def place_file(source: Path, target: Path, *, sync: bool) -> None:
    """Rename `source` to `target` atomically. With `sync`, flush its bytes first and the directory afterwards. Raises OSError."""
    if sync:
        _force(source)
    os.replace(source, target)
    if sync:
        try:
            _force(target.parent)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # these file systems cannot sync a directory
                raise


def _force(path: Path) -> None:
    """Flush a file's bytes, or a directory's entries, to the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def try_lock(file: int | BinaryIO, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock an open file until it is closed, without waiting; return False if another process holds a lock that excludes it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_locked(path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    """Return whether a process holds a lock on the file that excludes one of `kind`; False without the file. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return not try_lock(descriptor, kind)
        finally:
            os.close(descriptor)
    return False


def withheld_folder(path: Path) -> Path | None:
    """Return the folder around `path` that macOS withholds from services and ssh sessions; None if there is none."""
    if sys.platform != "darwin":
        return None
    places = [Path("/Volumes"), *(Path.home() / name for name in WITHHELD_FOLDERS)]
    return next((place for place in places if path.resolve().is_relative_to(place.resolve())), None)


def file_trouble(error: OSError) -> str:
    """Return why a file cannot be opened or read, with a remedy where the system's message misleads.

    macOS's privacy rules cause EPERM; file modes cause EACCES.
    """
    words = error.strerror or str(error)
    if sys.platform == "darwin" and error.errno == errno.EPERM:
        return f"{words}: {WITHHELD}"
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{words}: this process may have {most}; raise the limit (`ulimit -n 65536`) and start it again"
    return words
