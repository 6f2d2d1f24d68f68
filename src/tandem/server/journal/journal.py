"""An append-only file of accepted requests and their answers, which outlives the process, and the machine's power.

The file begins with a line that names the format and a salt. Each record is MAGIC, the length of its payload, a
checksum of length and payload (CRC-32 that begins with the salt, so that no client can smuggle in a record), and the
payload in msgpack. What is damaged is skipped, as far as the next record that is whole; what is torn at the end is cut
off. A copy of the file as it was found is kept then.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import shutil
import struct
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from tandem.errors import ConfigError, UnavailableError

logger = logging.getLogger(__name__)

FORMAT = b"tandem journal 1\n"
SALT_BYTES = 4
MAGIC = b"\xf5TJr"
_HEAD = struct.Struct("<4sII")
"""MAGIC, length of the payload, checksum."""
_LENGTH = struct.Struct("<I")
START = len(FORMAT) + SALT_BYTES
"""Where the first record begins."""
MOST_DEAD = 16 * 2**20
"""Bytes of records that are no longer needed from which on, when they outweigh the others, the file is rewritten."""


class Accepted(Struct, frozen=True, tag=True, array_like=True):
    """A request that is to be answered, whatever happens."""

    id: str
    group: str
    """Who asked, as for fair shares."""
    key: str
    """The client's Idempotency-Key; empty if it gave none."""
    digest: bytes
    """Of route and body."""
    route: str
    body: bytes
    created: float
    """Seconds since 1970."""
    background: bool
    """Nobody waits for the answer."""


class Answered(Struct, frozen=True, tag=True, array_like=True):
    """How it ended."""

    id: str
    status: int
    """Of the HTTP response."""
    body: bytes


class Dropped(Struct, frozen=True, tag=True, array_like=True):
    """Neither request nor answer is needed any more."""

    id: str


Record = Accepted | Answered | Dropped
Span = tuple[int, int]
"""Offset of a record, and its length."""


class JournalError(UnavailableError):
    """The journal cannot be written: nothing is accepted that could be lost."""


@dataclass
class Entry:
    """What is kept in memory of a request in the journal."""

    id: str
    group: str
    key: str
    digest: bytes
    created: float
    background: bool
    request: Span
    answer: Span | None = None


class Journal:
    """The journal in one directory. Used by one thread, but for `sync_file` and `copy`."""

    def __init__(self, directory: Path, clock: Callable[[], float] = time.time) -> None:
        """Open, or begin, and read it. Raises ConfigError when that cannot be, or another process has it."""
        self.path = directory / "journal"
        self.entries: dict[str, Entry] = {}
        """Requests by id, in the order in which they were accepted."""
        self.damaged = 0
        """Bytes that could not be read at the start, the torn end included."""
        self._clock = clock
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Record).decode
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(directory / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._open()
            except BaseException:
                os.close(self._lock)
                raise
        except BlockingIOError:
            message = f"--journal: another server uses {directory}; give each its own"
            raise ConfigError(message, param="journal") from None
        except OSError as error:
            raise ConfigError(f"--journal: cannot use {directory}: {error.strerror}", param="journal") from None
        except ValueError:
            raise ConfigError(f"--journal: {str(directory)!r} cannot be a directory", param="journal") from None

    def _open(self) -> None:
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            size = os.fstat(self._fd).st_size
            if size < START:  # new, or torn in its first bytes, before anything could be accepted
                os.ftruncate(self._fd, 0)
                _write(self._fd, FORMAT + os.urandom(SALT_BYTES), 0)
                os.fsync(self._fd)
                _sync_directory(self.path.parent)
                size = START
            head = os.pread(self._fd, START, 0)
            if not head.startswith(FORMAT):
                raise ConfigError(f"--journal: {self.path} is not a journal that this version can read; move it away",
                                  param="journal")
            self._salt = head[len(FORMAT):]
            self.end = START
            self._read(size)
            if self.damaged:
                self._mend()
        except BaseException:
            os.close(self._fd)
            raise

    # --- reading ---

    def _read(self, size: int) -> None:
        with mmap.mmap(self._fd, size, access=mmap.ACCESS_READ) as data:
            at = START
            while (at := data.find(MAGIC, at)) >= 0:
                payload = self._payload(data, at, size)
                record = None
                if payload is not None:
                    with contextlib.suppress(msgspec.MsgspecError):
                        record = self._decode(payload)
                if payload is None or record is None:
                    at += 1
                    continue
                self.damaged += at - self.end
                span = (at, _HEAD.size + len(payload))
                self.end = at = sum(span)
                self._apply(record, span)
        self.damaged += size - self.end

    def _mend(self) -> None:
        """Cut off the torn end, and keep a copy of all as it was, if there is room for it."""
        copy = self.path.with_name("journal.damaged")
        logger.warning("%s: %d bytes were torn or damaged; what is whole has been read, and %s is the file as it was",
                       self.path, self.damaged, copy)
        try:
            shutil.copyfile(self.path, copy)
            copy.chmod(0o600)
        except OSError as error:
            logger.warning("%s cannot be written: %s", copy, error.strerror)
        os.ftruncate(self._fd, self.end)

    def _payload(self, data: mmap.mmap | bytes, at: int, size: int) -> bytes | None:
        """The payload of the record at `at`; None unless all of it is there and as it was written."""
        if at + _HEAD.size > size:
            return None
        magic, length, checksum = _HEAD.unpack(data[at:at + _HEAD.size])
        start = at + _HEAD.size
        if magic != MAGIC or start + length > size:
            return None
        payload = bytes(data[start:start + length])
        return payload if checksum == self._checksum(payload) else None

    def _checksum(self, payload: bytes) -> int:
        return zlib.crc32(payload, zlib.crc32(_LENGTH.pack(len(payload)), zlib.crc32(self._salt)))

    def _apply(self, record: Record, span: Span) -> None:
        if isinstance(record, Accepted):
            self.entries[record.id] = Entry(record.id, record.group, record.key, record.digest, record.created,
                                            record.background, span)
        elif isinstance(record, Answered):
            if record.id in self.entries:
                self.entries[record.id].answer = span
        else:
            self.entries.pop(record.id, None)

    def load(self, span: Span) -> Record:
        """The record at `span`. Raises JournalError when it has been damaged since it was written."""
        offset, length = span
        data = os.pread(self._fd, length, offset)
        payload = self._payload(data, 0, len(data))
        if payload is None:
            raise JournalError("The journal is damaged here; send the request again, with another Idempotency-Key.")
        return self._decode(payload)

    # --- writing ---

    def append(self, record: Record) -> None:
        """Add a record. Raises JournalError, with the file as it was before, when there is no room for it."""
        data = self._framed(record)
        try:
            _write(self._fd, data, self.end)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self.end)
            raise JournalError(f"The journal cannot be written ({error.strerror}), so the request cannot be kept safe; "
                               "try again later, or without Idempotency-Key.", retry_after=30.0,
                               code="journal_unavailable") from None
        span = (self.end, len(data))
        self.end += len(data)
        self._apply(record, span)

    def _framed(self, record: Record) -> bytes:
        payload = self._encode(record)
        return _HEAD.pack(MAGIC, len(payload), self._checksum(payload)) + payload

    def sync_file(self) -> int:
        """Have the disk hold all that was appended before the call, up to the offset that is returned. For any thread.

        Raises OSError.
        """
        end = self.end
        os.fdatasync(self._fd)
        return end

    def expire(self, keep_s: float) -> list[Entry]:
        """Drop answered requests that were accepted more than `keep_s` seconds ago."""
        before = self._clock() - keep_s
        old = [entry for entry in self.entries.values() if entry.answer is not None and entry.created < before]
        for entry in old:
            self.append(Dropped(entry.id))
        return old

    # --- compaction ---

    def spans(self) -> Iterator[Span]:
        """The records that are still needed."""
        for entry in self.entries.values():
            yield entry.request
            if entry.answer is not None:
                yield entry.answer

    @property
    def dead(self) -> int:
        """Bytes of records that are not."""
        return self.end - START - sum(length for _, length in self.spans())

    @property
    def wasteful(self) -> bool:
        """It is time for `Compaction`."""
        dead = self.dead
        return dead > MOST_DEAD and dead > self.end // 2

    def replace(self, compaction: Compaction) -> None:
        """Go on with the new file. Raises OSError, with the old one in use as before."""
        compaction.copy(self.spans())  # what has come since
        for gone in compaction.ids - self.entries.keys():
            compaction.add(self._framed(Dropped(gone)))
        os.fsync(compaction.fd)
        os.rename(compaction.path, self.path)
        os.close(self._fd)
        self._fd, self.end = compaction.fd, compaction.end
        for entry in self.entries.values():
            entry.request = (compaction.moved[entry.request[0]], entry.request[1])
            if entry.answer is not None:
                entry.answer = (compaction.moved[entry.answer[0]], entry.answer[1])
        try:
            _sync_directory(self.path.parent)
        except OSError as error:
            logger.error("%s cannot be synced: %s", self.path.parent, error.strerror)

    def compaction(self) -> Compaction:
        """A new file to copy what is needed into. Raises OSError."""
        return Compaction(self._fd, self.path.with_name("journal.new"), FORMAT + self._salt, set(self.entries))

    def close(self) -> None:
        """Sync and close it."""
        with contextlib.suppress(OSError):
            os.fdatasync(self._fd)
        os.close(self._fd)
        os.close(self._lock)


class Compaction:
    """The new file of a journal that is being rewritten."""

    def __init__(self, source: int, path: Path, head: bytes, ids: set[str]) -> None:
        self.path = path
        self.ids = ids
        """Requests whose records may be copied."""
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.moved: dict[int, int] = {}
        """New offset of each record by its old one."""
        self.end = 0
        self._source = source
        self._head = head

    def add(self, data: bytes) -> None:
        """Append a record, or the head of the file. Raises OSError."""
        _write(self.fd, data, self.end)
        self.end += len(data)

    def copy(self, spans: Iterable[Span]) -> None:
        """Copy records that are not here yet, and sync. For any thread. Raises OSError."""
        if not self.end:
            self.add(self._head)
        for offset, length in spans:
            if offset not in self.moved:
                self.moved[offset] = self.end
                self.add(os.pread(self._source, length, offset))
        os.fdatasync(self.fd)

    def abandon(self) -> None:
        """Remove the new file."""
        os.close(self.fd)
        self.path.unlink(missing_ok=True)


def _sync_directory(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _write(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written
