"""Reading what may be no file, writing what only this user may read, and why a file cannot be opened where the
system's own words mislead."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import stat
import sys
from pathlib import Path
from typing import BinaryIO

WITHHELD = (
    "macOS withholds this folder from programs that were started over ssh, or by an app without permission: "
    "move the model out of Documents, Desktop, Downloads and external volumes, or allow it (System Settings, "
    "General, Sharing, Remote Login, Allow full disk access for remote users; for an app: Privacy & Security, "
    "Full Disk Access)"
)

WITHHELD_FOLDERS = ("Documents", "Desktop", "Downloads", "Library/Mobile Documents", "Library/CloudStorage")
"""Folders of a home, the last two iCloud's, that macOS withholds; beside them /Volumes."""

BY_HAND = 16 << 20
"""Most bytes that are read of a file that people write."""


class NotRegular(OSError):
    """Raised for a file that is not regular or too large. `strerror` has the remedy."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(errno.EINVAL, why, str(path))


def open_regular(path: str | Path, flags: int = 0) -> BinaryIO:
    """A file to read bytes from, opened with `flags` too. Raises OSError, NotRegular for what is none: a pipe would be
    waited for without end, and a device may have no end."""
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
    """All of a file of at most `most` bytes. Raises OSError, NotRegular for what is none or has more."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > most:
            raise NotRegular(path, f"it has more than {most >> 20 or 1} MiB; give another file")
        return file.read(size or most)  # the kernel's own do not say what they have


def read_text(path: str | Path, most: int = BY_HAND) -> str:
    """Return a file of at most `most` bytes as text in UTF-8, lines ended by `\\n`. Raises OSError, NotRegular,
    UnicodeDecodeError."""
    return read_regular(path, most).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")


def open_private(path: str | Path, mode: str) -> BinaryIO:
    """Open a file that nobody else may read. Raises OSError."""
    return open(
        path,
        mode,
        opener=lambda name, flags: os.open(  # type: ignore[return-value]
            name, flags | os.O_CLOEXEC, 0o600
        ),
    )


def write_private(path: Path, content: bytes, *, sync: bool = True) -> None:
    """Replace a file that nobody else may read in one piece; with `sync` it outlives the machine's power. Raises
    OSError."""
    temporary = path.with_suffix(".tmp")
    try:
        temporary.unlink(missing_ok=True)  # one that was left there keeps its mode
        with open_private(temporary, "wb") as file:
            file.write(content)
        place_file(temporary, path, sync=sync)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def place_file(source: Path, target: Path, *, sync: bool) -> None:
    """Give a file its name, with `sync` once its bytes are on the disk. Raises OSError."""
    if sync:
        _force(source)
    os.replace(source, target)
    if sync:
        try:
            _force(target.parent)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that keep names without being asked
                raise


def _force(path: Path) -> None:
    """Have the bytes of a file, or the names in a directory, on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def withheld_folder(path: Path) -> Path | None:
    """Return the folder around `path` that macOS withholds from services and from ssh; None elsewhere."""
    if sys.platform != "darwin":
        return None
    places = [Path("/Volumes"), *(Path.home() / name for name in WITHHELD_FOLDERS)]
    return next((place for place in places if path.resolve().is_relative_to(place.resolve())), None)


def file_trouble(error: OSError) -> str:
    """Why a file cannot be opened or read, and what to do where the system's words do not say it.

    macOS's privacy rules answer EPERM; the modes of a file answer EACCES.
    """
    words = error.strerror or str(error)
    if sys.platform == "darwin" and error.errno == errno.EPERM:
        return f"{words}: {WITHHELD}"
    if error.errno == errno.EMFILE:
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"{words}: this process may have {most}; raise the limit (`ulimit -n 65536`) and start it again"
    return words
