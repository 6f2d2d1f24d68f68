"""Files of clients, in a directory of the journal: what they sent, and results of batches. For one event loop.

A file is two, `ID.json` and `ID.data`; one without the other is nothing. Ids are made here, and names that clients give
are never part of a path.
"""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
from msgspec import Struct

from tandem.errors import ConfigError, RequestError, UnavailableError
from tandem.server.context import new_id
from tandem.system.files import open_private, place_file, write_private

KEEP_S = 30 * 86400.0
"""Seconds for which a file is kept unless it says otherwise, as OpenAI has it."""
MOST_FILES = 1000
"""Of one client."""
Record = TypeVar("Record", bound=Struct)


class File(Struct, kw_only=True):
    """What is known of a file beside its bytes."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: float
    expires_at: float

    def shown(self) -> dict[str, object]:
        """As OpenAI's file object."""
        return {"id": self.id, "object": "file", "bytes": self.bytes, "created_at": int(self.created_at),
                "expires_at": int(self.expires_at), "filename": self.filename, "purpose": self.purpose,
                "status": "processed", "status_details": None}


def disk_trouble(error: OSError) -> tuple[str, str]:
    """What is wrong with the disk: a code, and words."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full", "the disk is full"
    return "disk_error", f"the disk fails ({error.strerror})"


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Around what reads or writes for a client: raises UnavailableError for an OSError."""
    try:
        yield
    except OSError as error:
        code, why = disk_trouble(error)
        raise UnavailableError(f"Files cannot be read or written now: {why}. Try again later.", retry_after=30.0,
                               code=code) from None


def write_record(path: Path, record: Struct, *, sync: bool) -> None:
    """Replace a record in one piece. Raises OSError."""
    write_private(path, msgspec.json.encode(record), sync=sync)


def read_records(directory: Path, pattern: str, kind: type[Record]) -> list[Record]:
    """All whole records of a kind. Raises OSError."""
    found = []
    for path in directory.glob(pattern):
        with contextlib.suppress(msgspec.DecodeError):
            found.append(msgspec.json.decode(path.read_bytes(), type=kind))
    return found


class Files:
    """All files of all clients."""

    def __init__(self, directory: Path, *, max_bytes: float, sync: bool) -> None:
        """Raises ConfigError when the directory cannot be used."""
        self.directory = directory
        self.sync = sync
        self.thread = ThreadPoolExecutor(1, "files")
        """Does what reads and writes, in the order in which it was asked for."""
        self._max_bytes = max_bytes
        self._coming: dict[Path, int] = {}
        """Bytes so far of files that are being sent."""
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for torn in directory.glob("*.tmp"):
                torn.unlink()
            self._files = {file.id: file for file in read_records(directory, "file-*.json", File)}
            records, data = ({path.stem for path in directory.glob(f"file-*.{kind}")} for kind in ("json", "data"))
            for name in records ^ data:  # it was just being added, or dropped
                self._files.pop(name, None)
                for kind in ("json", "data"):
                    (directory / f"{name}.{kind}").unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(f"--journal: cannot use {directory}: {error.strerror}", param="journal") from None

    def of(self, owner: str | None) -> list[File]:
        """Files of a client, of everybody for None, the oldest first."""
        mine = [file for file in list(self._files.values()) if owner in (None, file.owner)]
        return sorted(mine, key=lambda file: (file.created_at, file.id))

    def find(self, file_id: str, owner: str | None) -> File | None:
        """A file of a client, of anybody for None."""
        file = self._files.get(file_id)
        return file if file is not None and owner in (None, file.owner) else None

    def path(self, file_id: str) -> Path:
        """Where the bytes of a file are."""
        return self.directory / f"{file_id}.data"

    def check_room(self, owner: str) -> None:
        """Raises RequestError when the client may not keep another file."""
        if len(self.of(owner)) >= MOST_FILES:
            raise RequestError(f"At most {MOST_FILES} files are kept for one client; delete some.", param="file",
                               code="too_many_files")
        kept = sum(file.bytes for file in list(self._files.values()))
        if kept + sum(self._coming.values()) > self._max_bytes:
            raise RequestError(f"Files would take more than {self._max_bytes / 2**30:g} GiB (--files-max-gb); delete "
                               "some.", param="file", code="files_limit_exceeded")

    def begin(self, owner: str) -> tuple[Path, BinaryIO]:
        """A place for a file that is coming, until `end`. Raises RequestError."""
        self.check_room(owner)
        path = self.directory / f"{new_id('upload')}.tmp"
        with on_disk():
            out = open_private(path, "xb")
        self._coming[path] = 0
        return path, out

    def grow(self, owner: str, path: Path, size: int) -> None:
        """A file that is coming has so many bytes now. Raises RequestError when there is no room for them."""
        self._coming[path] = size
        self.check_room(owner)

    def end(self, path: Path) -> None:
        """It has come, or will not."""
        del self._coming[path]
        with contextlib.suppress(OSError):  # what cannot be removed goes at the next start
            path.unlink(missing_ok=True)

    def add(self, file: File, source: Path) -> None:
        """Make `source` the bytes of a file; whoever is interrupted can do it again. Raises OSError."""
        write_record(self.directory / f"{file.id}.json", file, sync=self.sync)
        place_file(source, self.path(file.id), sync=self.sync)
        self._files[file.id] = file

    def drop(self, file_id: str) -> None:
        """Keep nothing of a file. Raises OSError."""
        (self.directory / f"{file_id}.json").unlink(missing_ok=True)
        self.path(file_id).unlink(missing_ok=True)
        self._files.pop(file_id, None)

    def drop_expired(self) -> None:
        """Drop files whose time is over. Raises OSError."""
        now = time.time()
        for file in list(self._files.values()):
            if file.expires_at < now:
                self.drop(file.id)
