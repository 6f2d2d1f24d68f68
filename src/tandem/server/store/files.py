"""Clients' files: uploads and results of batches.

A file's content is `ID.data` in the journal's directory, its metadata a record in the database. Content without a record
is removed at start. Ids are generated; file names from clients are never part of a path.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

from fastapi import Request
from python_multipart.exceptions import FormParserError
from starlette.datastructures import Headers, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from tandem.errors import ConfigError, RequestError, TooLargeError, UnavailableError, invalid
from tandem.server.context import new_id
from tandem.server.failures import ClientGone, refused
from tandem.server.store.jobs import Jobs
from tandem.server.store.journal import ClientRecord, Record
from tandem.system.files import file_errors, open_private, place_file

KEEP_S = 30 * 86400.0
"""Default retention of a file in seconds, as at OpenAI."""
MOST_FILES = 1000
"""Most files of one client."""
IDLE_S = 60.0
"""Timeout, in seconds, between two chunks of an upload."""
AROUND = 2**16
"""Most bytes of a form besides its file."""
MOST_PARTS, LONGEST_NAME = 16, 255
SHORTEST_S, LONGEST_S = 3600, 30 * 86400
"""Bounds of `expires_after`, in seconds, as at OpenAI."""
Result = TypeVar("Result")


class Records(Generic[Record]):
    """All records of one type, stored in the journal and cached in memory."""

    def __init__(self, jobs: Jobs, kind: type[Record]) -> None:
        self._jobs = jobs
        self._records = {record.id: record for record in jobs.journal.records(kind)}

    def of(self, owner: str | None) -> list[Record]:
        """Return the records of a client (None: of all clients), oldest first."""
        mine = [record for record in self._records.values() if owner in (None, record.owner)]
        return sorted(mine, key=lambda record: (record.created_at, record.id))

    def find(self, name: str, owner: str | None) -> Record | None:
        """Return the record with the id `name` if `owner` owns it (None: any owner), else None."""
        record = self._records.get(name)
        return record if record is not None and owner in (None, record.owner) else None

    async def put(self, record: Record) -> None:
        """Add or replace a record. Raises JournalError."""
        await self._jobs.write(self._jobs.journal.put, record)
        self._records[record.id] = record

    async def remove(self, *names: str) -> None:
        """Delete the records with the ids `names`. Raises JournalError."""
        await self._jobs.write(self._jobs.journal.remove, *names)
        for name in names:
            self._records.pop(name, None)


class File(ClientRecord, kw_only=True):
    """Metadata of a file. Times are seconds since 1970."""

    filename: str
    purpose: str
    bytes: int
    expires_at: float

    def shown(self) -> dict[str, object]:
        """Return OpenAI's file object."""
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.bytes,
            "created_at": int(self.created_at),
            "expires_at": int(self.expires_at),
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


def disk_trouble(error: OSError) -> tuple[str, str]:
    """Return error code and description of a disk failure."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "disk_full", "the disk is full"
    return "disk_error", f"the disk fails ({error.strerror})"


@contextlib.contextmanager
def on_disk() -> Iterator[None]:
    """Convert an OSError raised inside to UnavailableError."""
    try:
        yield
    except OSError as error:
        code, why = disk_trouble(error)
        raise UnavailableError(
            f"Files cannot be read or written now: {why}. Try again later.", retry_after=30.0, code=code
        ) from None


class Files(Records[File]):
    """All files of all clients. Not thread-safe: use on one event loop."""

    def __init__(self, jobs: Jobs, directory: Path, *, max_bytes: float, sync: bool, reading: Iterable[str] = ()
                 ) -> None:  # fmt: skip
        """Read the records, and remove content without a record, except of the ids in `reading`.

        Records without content expire. `max_bytes`: limit of all files; `sync`: sync files to disk. Raises ConfigError if
        the directory is unusable.
        """
        super().__init__(jobs, File)
        self.directory = directory
        self.reading = Counter(reading)
        """Number of readers by file id; their content is kept even if a client deletes the file."""
        self._sync = sync
        self._thread = ThreadPoolExecutor(1, "files")
        self._max_bytes = max_bytes
        self._coming: dict[BinaryIO, int] = {}
        """Bytes received so far of running uploads, by output file."""
        with file_errors(f"--journal: cannot use {directory}", param="journal", kind=ConfigError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            for path in directory.iterdir():
                if path.suffix != ".data" or not (path.stem in self._records or self.reading[path.stem]):
                    path.unlink()
            for file in self._records.values():
                if not self.path(file.id).exists():
                    file.expires_at = 0.0

    def close(self) -> None:
        """Stop the file thread."""
        self._thread.shutdown()

    async def in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Run `work(*arguments)` in the file thread, which runs one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content."""
        return self.directory / f"{file_id}.data"

    def check_room(self, owner: str, more: int = 0) -> None:
        """Raise RequestError if the client may not store another file of `more` bytes."""
        if len(self.of(owner)) >= MOST_FILES:
            raise RequestError(
                f"At most {MOST_FILES} files are kept for one client; delete some.", param="file", code="too_many_files"
            )
        kept = sum(file.bytes for file in self._records.values()) + self._jobs.lines_bytes.total()
        if kept + sum(self._coming.values()) + more > self._max_bytes:
            raise RequestError(
                f"Files would take more than {self._max_bytes / 2**30:g} GiB (--files-max-gb); delete some.",
                param="file",
                code="files_limit_exceeded",
            )

    def place(self, source: BinaryIO, file_id: str) -> None:
        """Close `source` and move it to the content path of `file_id`; the caller adds the record. Raises OSError."""
        source.close()
        place_file(Path(source.name), self.path(file_id), sync=self._sync)

    async def take(self, http: Request, owner: str, limit: int) -> File:
        """Receive an upload form and store its file of at most `limit` bytes. Raises RequestError."""
        declared = http.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > limit + AROUND:
            raise _too_large(limit)
        self.check_room(owner)
        path = self.directory / f"{new_id('upload')}.tmp"
        with on_disk():
            out = open_private(path, "xb")
        self._coming[out] = 0
        try:
            form = _Upload(http.headers, self._pieces(http, owner, limit, out), out)
            with on_disk():
                file = await form.read(owner)
                if file.bytes > limit:
                    raise _too_large(limit)
                self._coming[out] = file.bytes
                self.check_room(owner)
                await self.in_thread(self.place, out, file.id)
            try:
                await self.put(file)
            except UnavailableError:
                with contextlib.suppress(OSError):  # else removed at the next start
                    await self.in_thread(self.path(file.id).unlink, True)
                raise
            return file
        finally:
            del self._coming[out]
            with contextlib.suppress(OSError):  # closing flushes again, which fails on a full disk
                out.close()
            with contextlib.suppress(OSError):  # else removed at the next start
                path.unlink(missing_ok=True)

    async def _pieces(self, http: Request, owner: str, limit: int, out: BinaryIO) -> AsyncGenerator[bytes, None]:
        """Yield the body in chunks. Raises RequestError if it is too large or stalls for `IDLE_S`, ClientGone."""
        pieces = http.stream()
        size = 0
        try:
            while True:
                async with asyncio.timeout(IDLE_S):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                size += len(piece)
                if size > limit + AROUND:
                    raise _too_large(limit)
                self._coming[out] = out.tell()
                self.check_room(owner)
                yield piece
        except TimeoutError:
            raise refused(408, f"Nothing of the body arrived within {IDLE_S:.0f}s.", code="request_timeout") from None
        except ClientDisconnect:
            raise ClientGone("The client left.") from None

    async def drop(self, file_id: str) -> None:
        """Delete a file; its content stays while it has readers. Raises OSError, JournalError."""
        if not self.reading[file_id]:
            await self.in_thread(self.path(file_id).unlink, True)
        await self.remove(file_id)

    async def end_reading(self, file_id: str) -> None:
        """Release a reader of a file; remove the content if it was the last and the file was deleted."""
        self.reading[file_id] -= 1
        if not self.reading[file_id] and file_id not in self._records:
            with contextlib.suppress(OSError):  # else removed at the next start
                await self.in_thread(self.path(file_id).unlink, True)

    async def drop_expired(self) -> None:
        """Delete expired files; failures are retried at the next call."""
        now = time.time()
        for file in [file for file in self._records.values() if file.expires_at < now]:
            with contextlib.suppress(OSError, UnavailableError):
                await self.drop(file.id)


class _Upload(MultiPartParser):
    """Multipart parser that writes the form's file to `out` while receiving."""

    def __init__(self, headers: Headers, pieces: AsyncGenerator[bytes, None], out: BinaryIO) -> None:
        super().__init__(headers, pieces, max_files=1, max_fields=MOST_PARTS, max_part_size=AROUND)
        self._out = out
        self._whole = False

    def on_headers_finished(self) -> None:
        """Redirect the content of a file part to `out` (a parser callback)."""
        super().on_headers_finished()
        if self._current_part.file is not None:
            self._current_part.file.file.close()
            self._current_part.file.file = self._out

    def on_end(self) -> None:
        """Note that the form is complete (a parser callback)."""
        self._whole = True

    async def read(self, owner: str) -> File:
        """Receive the form and return the metadata of its file. Raises RequestError naming the field, OSError."""
        if not self.headers.get("content-type", "").lower().startswith("multipart/form-data"):
            raise RequestError(
                "A file is sent as multipart/form-data, with the fields 'purpose' and 'file'.", param="file", code="invalid_form"
            )
        try:
            form = await self.parse()
        except (MultiPartException, FormParserError) as error:
            raise _malformed(getattr(error, "message", str(error))) from None
        if not self._whole:
            raise _malformed("it ends too early")
        if strangers := form.keys() - {"purpose", "file", *_EXPIRY}:
            name = min(strangers)[:40]
            raise RequestError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
        purpose, upload = form.get("purpose"), form.get("file")
        if purpose is None or not isinstance(upload, UploadFile):
            missing = "purpose" if purpose is None else "file"
            raise RequestError(f"Missing required parameter: '{missing}'.", param=missing, code="missing_required_parameter")
        if purpose != "batch":
            raise invalid("purpose", f"Invalid 'purpose': '{str(purpose)[:40]}'; only files for 'batch' have a use here.")
        if not upload.size:
            raise invalid("file", "'file' is empty.")
        now = time.time()
        return File(
            id=new_id("file"),
            owner=owner,
            filename=(upload.filename or "file")[:LONGEST_NAME],
            purpose="batch",
            bytes=upload.size,
            created_at=now,
            expires_at=now + _keep_s(*map(form.get, _EXPIRY)),
        )


_EXPIRY = ("expires_after[anchor]", "expires_after[seconds]")


def _keep_s(anchor: object, seconds: object) -> float:
    if anchor is None and seconds is None:
        return KEEP_S
    if anchor != "created_at":
        raise invalid("expires_after[anchor]", "Invalid 'expires_after[anchor]': expected 'created_at'.")
    if not (
        isinstance(seconds, str) and seconds.isascii() and seconds.isdigit() and SHORTEST_S <= int(seconds[:20]) <= LONGEST_S
    ):
        raise invalid("expires_after[seconds]", f"Invalid 'expires_after[seconds]': expected {SHORTEST_S} to {LONGEST_S}.")
    return float(seconds)


def _malformed(why: str) -> RequestError:
    return RequestError(f"The body is not a well-formed multipart/form-data: {why[:200].rstrip('.')}.", code="invalid_form")


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The file is larger than the limit of {limit} bytes (--max-file-mb).", param="file")
