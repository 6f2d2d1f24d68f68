"""Durable journal in SQLite: accepted requests, their answers, and records of files and batches."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import Struct

from tandem.errors import ConfigError, NotFoundError, RequestError, ServerError, UnavailableError
from tandem.server.store.database import NOT_OURS, code_of, open_whole, pragma, seal
from tandem.system.files import file_errors

MOST_FREE = 16 * 2**20
"""Bytes of free pages above which the database is shrunk, if they are also more than half of its pages."""
PAGES_AT_ONCE, ROWS_AT_ONCE = 1024, 256
"""Most pages freed, and most rows read or dropped, per call."""
BYTES_AT_ONCE = 2**22
"""Approximate limit of bytes of answers to read per call."""
LINE_BYTES = 1300
"""Approximate upper bound of bytes that a batch line and its answer take besides their bodies."""
KEPT_OPEN = float("inf")
"""`created` of batch lines, which expire only with their batch."""
CLIENT_WAITS, BACKGROUND, LINE = 0, 1, 2
"""Values of `Entry.background`."""
_FIXED = "id, owner, key, digest, route, created, background, outline"
_ENTRIES = f"SELECT requests.number, {_FIXED}, status, length(requests.body) FROM requests LEFT JOIN answers USING (number)"
_LINES_SIZE = f"coalesce(sum(length(requests.body) + coalesce(length(answers.body), 0) + {LINE_BYTES}), 0)"
_OF_BATCH = f"key = ? AND key != '' AND owner = ? AND background = {LINE}"


def make_directory(directory: Path) -> None:
    """Create the journal's directory if missing. Raises ConfigError if it is unusable."""
    try:
        with file_errors(f"--journal: cannot use {directory}", param="journal", kind=ConfigError):
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except ValueError:
        raise _unusable(f"{str(directory)!r} cannot be a directory") from None


class JournalError(UnavailableError):
    """The journal failed; the request is refused, as it could be lost."""


class Entry(Struct, frozen=True):
    """A request in the journal: a client's, or a line of a batch."""

    number: int
    """Row number in order of acceptance; 0 before it is stored."""
    id: str
    group: str
    """Client group, as for fair queueing."""
    key: str
    """Idempotency-Key, empty without one; for a line, the batch's id."""
    digest: bytes
    """Hash of route and body."""
    route: str
    created: float
    """Seconds since 1970."""
    background: int
    """CLIENT_WAITS, BACKGROUND or LINE."""
    outline: bytes = b""
    """JSON to show until there is an answer, if any; for a line, its custom_id."""
    status: int | None = None
    """HTTP status of the answer; None without one."""
    size: int = 0
    """Size of the request's body in bytes."""


class ClientRecord(Struct, kw_only=True):
    """Base of records that belong to a client group (`owner`)."""

    id: str
    owner: str
    created_at: float
    """Seconds since 1970."""


Record = TypeVar("Record", bound=ClientRecord)


class Journal:
    """Journal in one directory. Use from one thread, except `size`.

    All methods raise sqlite3.Error; `told` converts it to an error for clients.
    """

    def __init__(
        self, directory: Path, sync: str = "always", clock: Callable[[], float] = time.time, max_bytes: float = float("inf")
    ) -> None:
        """Open or create the database and check it. `sync`: --journal-sync; `max_bytes`: --journal-max-gb in bytes.

        Raises ConfigError if that fails or another process uses it.
        """
        self.path = directory / "journal.db"
        self._sync = sync
        self._clock = clock
        self._max_bytes = max_bytes
        make_directory(directory)
        try:
            self._database = open_whole(self.path, durable=sync == "always")
            self._places = self._files()
        except sqlite3.Error as error:
            code = code_of(error)
            if code == sqlite3.SQLITE_NOTADB:
                raise _unusable(f"{self.path} {NOT_OURS}") from None
            busy = code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
            raise _unusable(
                f"another server uses {directory}; give each its own" if busy else f"cannot use {directory}: {_why(error)}"
            ) from None
        except OSError as error:
            raise _unusable(f"cannot use {directory}: {error.strerror}") from None

    def _files(self) -> list[tuple[int, int]]:
        """Return device and inode of the database's files."""
        files = []
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            with contextlib.suppress(OSError):
                files.append((path.stat().st_dev, path.stat().st_ino))
        return files

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """Begin a transaction and return its context manager, which commits, or rolls back after an exception."""
        if self._files() != self._places:  # SQLite would keep writing to moved or deleted files
            moved = sqlite3.OperationalError("the journal's files were moved")
            moved.sqlite_errorcode, moved.sqlite_errorname = sqlite3.SQLITE_READONLY_DBMOVED, "SQLITE_READONLY_DBMOVED"
            raise moved
        self._database.execute("BEGIN IMMEDIATE")
        return self._database

    # --- in a transaction ---

    def accept(self, entry: Entry, body: bytes, *, everybody: bool, refusal: RequestError | None) -> Entry:
        """Add a request and return it, or return an existing one with its key. Raises `refusal`, if any, for a new one.

        `everybody`: look for the key among all clients.
        """
        known = self.find(entry.group, entry.key, everybody=everybody) if entry.key else None
        if known is not None:
            return known
        if refusal is not None:
            raise refusal
        return self.add(entry, body)

    def add(self, entry: Entry, body: bytes) -> Entry:
        """Add a request and return its entry with the row number."""
        fixed = msgspec.structs.astuple(entry)[1:-2]
        values = (*fixed, seal(body, *fixed), body)
        added = self._database.execute("INSERT INTO requests VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return msgspec.structs.replace(entry, number=added.lastrowid, size=len(body))

    def keep(self, entry: Entry, body: bytes, answer: bytes) -> None:
        """Add a request together with its answer (status 200)."""
        self.answer(self.add(entry, body), 200, answer)

    def find(self, group: str, name: str, *, everybody: bool) -> Entry | None:
        """Return the request of a client (`everybody`: of any) with this Idempotency-Key or id, or None."""
        for column in ("key", "id"):
            query = (
                f"{_ENTRIES} WHERE {column} = ? AND {column} != '' AND (? OR owner = ?) AND background != {LINE} "
                "ORDER BY number DESC LIMIT 1"
            )
            for row in self._database.execute(query, (name, everybody, group)):
                return Entry(*row)
        return None

    def pending(self) -> list[Entry]:
        """Return unanswered requests, except batch lines, in order of acceptance."""
        query = f"{_ENTRIES} WHERE status IS NULL AND background != {LINE} ORDER BY number"
        return [Entry(*row) for row in self._database.execute(query)]

    def request(self, entry: Entry) -> bytes:
        """Return the body of a request. Raises ServerError if damaged, NotFoundError if deleted."""
        return self._sealed(f"SELECT {_FIXED}, seal, body FROM requests WHERE number = ?", entry)

    def reply(self, entry: Entry) -> bytes:
        """Return the body of an answer. Raises ServerError if damaged, NotFoundError if deleted."""
        return self._sealed(
            """SELECT id, digest, status, answers.seal, answers.body FROM answers
            JOIN requests USING (number) WHERE number = ?""",
            entry,
        )

    def _sealed(self, query: str, entry: Entry) -> bytes:
        """Return the last column of a row after checking it against the checksum in the column before."""
        row = self._database.execute(query, (entry.number,)).fetchone()
        if row is None:
            raise NotFoundError("It was deleted, or dropped, while it was read.", code="request_not_found")
        *values, sealed, body = row
        if not isinstance(body, bytes) or sealed != seal(body, *values):
            raise ServerError(
                "The journal is damaged here; send the request again, with another Idempotency-Key.", code="journal_damaged"
            )
        return body

    def answer(self, entry: Entry, status: int, body: bytes) -> None:
        """Store the answer to a request, unless the request was deleted meanwhile."""
        values = (status, seal(body, entry.id, entry.digest, status), body, entry.number)
        self._database.execute("INSERT INTO answers SELECT number, ?, ?, ? FROM requests WHERE number = ?", values)

    def drop(self, entry: Entry) -> None:
        """Delete a request and its answer."""
        self._database.execute("DELETE FROM requests WHERE number = ?", (entry.number,))

    def add_lines(self, lines: Iterable[tuple[Entry, bytes]]) -> None:
        """Add batch lines, each with its body."""
        for entry, body in lines:
            self.add(entry, body)

    def open_lines(self, batch_id: str, owner: str, after: int) -> list[Entry]:
        """Return the next unanswered lines of a batch with row numbers above `after`."""
        query = f"{_ENTRIES} WHERE {_OF_BATCH} AND number > ? AND status IS NULL ORDER BY number LIMIT {ROWS_AT_ONCE}"
        return [Entry(*row) for row in self._database.execute(query, (batch_id, owner, after))]

    def answered_lines(self, batch_id: str, owner: str, after: int) -> list[tuple[Entry, bytes]]:
        """Return the next lines of a batch with row numbers above `after`, with their answers (empty: unanswered).

        Damaged answers are deleted, so that their lines run again.
        """
        query = f"{_ENTRIES} WHERE {_OF_BATCH} AND number > ? ORDER BY number LIMIT {ROWS_AT_ONCE}"
        lines: list[tuple[Entry, bytes]] = []
        size = 0
        for row in self._database.execute(query, (batch_id, owner, after)).fetchall():
            entry, body = Entry(*row), b""
            if entry.status is not None:
                try:
                    body = self.reply(entry)
                except ServerError:
                    self._database.execute("DELETE FROM answers WHERE number = ?", (entry.number,))
                    entry = msgspec.structs.replace(entry, status=None)
            lines.append((entry, body))
            size += len(body)
            if size > BYTES_AT_ONCE:
                break
        return lines

    def count_lines(self, batch_id: str, owner: str) -> tuple[int, int, int]:
        """Return the numbers of answers with status 200 and of others, and the bytes of a batch's lines and answers."""
        query = f"""SELECT count(*) FILTER (WHERE status = 200), count(*) FILTER (WHERE status != 200), {_LINES_SIZE}
            FROM requests LEFT JOIN answers USING (number) WHERE {_OF_BATCH}"""
        completed, failed, size = self._database.execute(query, (batch_id, owner)).fetchone()
        return completed, failed, size

    def batches_with_lines(self) -> list[tuple[str, str, int]]:
        """Return id, owner and bytes (lines and answers) of each batch that has lines."""
        query = f"""SELECT key, owner, {_LINES_SIZE} FROM requests LEFT JOIN answers USING (number)
            WHERE background = {LINE} GROUP BY key, owner"""
        return self._database.execute(query).fetchall()

    def drop_lines(self, batch_id: str, owner: str) -> bool:
        """Delete up to `ROWS_AT_ONCE` lines of a batch; return False if there were none."""
        query = f"""DELETE FROM requests WHERE number IN (SELECT number FROM requests WHERE {_OF_BATCH}
            LIMIT {ROWS_AT_ONCE})"""
        return self._database.execute(query, (batch_id, owner)).rowcount > 0

    def records(self, kind: type[Record]) -> list[Record]:
        """Return all records of a type; damaged ones are skipped."""
        query = "SELECT id, seal, body FROM records WHERE kind = ? ORDER BY number"
        return [
            msgspec.json.decode(body, type=kind)
            for name, sealed, body in self._database.execute(query, (kind.__name__,))
            if sealed == seal(body, name, kind.__name__)
        ]

    def put(self, record: ClientRecord) -> None:
        """Add a record, or replace the one with the same `id`."""
        kind, body = type(record).__name__, msgspec.json.encode(record)
        self._database.execute(
            """INSERT INTO records(id, kind, seal, body) VALUES (?, ?, ?, ?)
            ON CONFLICT(id) DO UPDATE SET seal = excluded.seal, body = excluded.body""",
            (record.id, kind, seal(body, record.id, kind), body),
        )

    def remove(self, *ids: str) -> None:
        """Delete the records with these ids."""
        self._database.executemany("DELETE FROM records WHERE id = ?", [(name,) for name in ids])

    # --- outside of a transaction ---

    def tidy(self, keep_s: float, lines_bytes: int = 0) -> bool:
        """Delete answered requests older than `keep_s` seconds and the oldest above the size limit; shrink; sync.

        `lines_bytes`: bytes of batch lines, which the limit excludes. Return True if requests were deleted for size, as
        more may have to go.
        """
        dropped = 0
        with self.transaction() as database:
            database.execute(
                """DELETE FROM requests WHERE number IN (SELECT number FROM requests JOIN answers
                USING (number) WHERE created < ? LIMIT ?)""",
                (self._clock() - keep_s, ROWS_AT_ONCE),
            )
        free, pages, size = (pragma(database, name) for name in ("freelist_count", "page_count", "page_size"))
        if (pages - free) * size - lines_bytes > self._max_bytes:
            # Answers with an Idempotency-Key are kept for the whole retention time; the others if space permits.
            with self.transaction():
                dropped = database.execute(
                    """DELETE FROM requests WHERE number IN (SELECT number FROM requests JOIN
                    answers USING (number) WHERE key = '' AND created < 1e300 ORDER BY created LIMIT ?)""",
                    (ROWS_AT_ONCE // 8,),
                ).rowcount
        if free * size > MOST_FREE and free > pages // 2:
            database.executescript(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")  # `execute` ends after one page
        if self._sync == "everysec":
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return dropped > 0

    def size(self) -> int:
        """Return the size of the database's files in bytes."""
        return sum(path.stat().st_size for path in self.path.parent.glob("journal.db*"))

    def close(self) -> None:
        """Sync and close the database."""
        self._database.close()


_WHY = {
    sqlite3.SQLITE_FULL: "the disk is full",
    sqlite3.SQLITE_BUSY: "another process has locked it",
    sqlite3.SQLITE_READONLY: "it cannot be written to",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened",
    sqlite3.SQLITE_IOERR: "the disk fails",
    sqlite3.SQLITE_CORRUPT: "it is damaged; a restart of the server keeps what is whole",
    sqlite3.SQLITE_NOTADB: "it is damaged; a restart of the server keeps what is whole",
    sqlite3.SQLITE_TOOBIG: "this is larger than a row may be",
}


def _why(error: sqlite3.Error) -> str:
    if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_READONLY_DBMOVED:
        return "its files were removed or replaced while the server ran; a restart of the server begins another"
    name = getattr(error, "sqlite_errorname", type(error).__name__)
    return f"{_WHY.get(code_of(error), 'SQLite failed')} ({name})"


def told(error: sqlite3.Error) -> JournalError:
    """Convert a failure of SQLite to an error for clients."""
    return JournalError(
        f"The journal cannot be used, so the request cannot be kept safe: {_why(error)}. Try again "
        "later, or without Idempotency-Key.",
        retry_after=30.0,
        code="journal_unavailable",
    )


def _unusable(why: str) -> ConfigError:
    return ConfigError(f"--journal: {why}", param="journal")
