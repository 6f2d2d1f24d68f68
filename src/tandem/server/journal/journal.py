"""Accepted requests and their answers in an SQLite database, which outlives the process, and the machine's power."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
from msgspec import Struct

from tandem.errors import ConfigError, NotFoundError, RequestError, ServerError, UnavailableError
from tandem.server.journal.database import NOT_OURS, code_of, open_whole, pragma, seal

MOST_FREE = 16 * 2**20
"""Bytes of free pages from which on, when they outweigh the others, pages are given back to the disk."""
PAGES_AT_ONCE, ANSWERS_AT_ONCE = 4096, 256
"""Given back, and dropped, in one turn of `tidy`."""
_FIXED = "id, owner, key, digest, route, created, background, outline"
_ENTRIES = (f"SELECT requests.number, {_FIXED}, status, length(requests.body) FROM requests "
            "LEFT JOIN answers USING (number)")


def make_directory(directory: Path) -> None:
    """Begin a journal's directory, if there is none. Raises ConfigError when it cannot be one."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if (directory / "journal").exists():
            raise _unusable(f"{directory / 'journal'} is of an earlier version of Tandem, which alone can answer "
                            "what is open in it; give another directory, or move the file away")
    except OSError as error:
        raise _unusable(f"cannot use {directory}: {error.strerror}") from None
    except ValueError:
        raise _unusable(f"{str(directory)!r} cannot be a directory") from None


class JournalError(UnavailableError):
    """The journal cannot be used: nothing is accepted that could be lost."""


class Entry(Struct, frozen=True):
    """A request in the journal."""

    number: int
    """In the order in which requests were accepted; 0 before that."""
    id: str
    group: str
    """Who asked, as for fair shares."""
    key: str
    """The client's Idempotency-Key; empty if it gave none."""
    digest: bytes
    """Of route and body."""
    route: str
    created: float
    """Seconds since 1970."""
    background: int
    """1 when nobody waits for the answer."""
    outline: bytes = b""
    """What is to be shown while there is no answer, for routes that show something."""
    status: int | None = None
    """Of the HTTP response; None before there is one."""
    size: int = 0
    """Bytes of the request's body."""


class Journal:
    """The journal in one directory. For one thread, but for `size`.

    All calls raise sqlite3.Error; `told` says what that means to a client.
    """

    def __init__(self, directory: Path, sync: str = "always", clock: Callable[[], float] = time.time,
                 max_bytes: float = float("inf")) -> None:
        """Open, or begin, and check it; `sync` as --journal-sync has it, `max_bytes` as --journal-max-gb.

        Raises ConfigError when that cannot be, or another process has it.
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
            raise _unusable(f"another server uses {directory}; give each its own" if busy else
                            f"cannot use {directory}: {_why(error)}") from None
        except OSError as error:
            raise _unusable(f"cannot use {directory}: {error.strerror}") from None

    def _files(self) -> list[tuple[int, int]]:
        """Which files bear the journal's names now."""
        found = []
        for path in (self.path, self.path.with_name(self.path.name + "-wal")):
            with contextlib.suppress(OSError):
                found.append((path.stat().st_dev, path.stat().st_ino))
        return found

    def transaction(self) -> AbstractContextManager[sqlite3.Connection]:
        """All of what is done in it is kept, or nothing."""
        if self._files() != self._places:  # SQLite would go on writing to files that nobody will find again
            moved = sqlite3.OperationalError("the journal's files were moved")
            moved.sqlite_errorcode, moved.sqlite_errorname = sqlite3.SQLITE_READONLY_DBMOVED, "SQLITE_READONLY_DBMOVED"
            raise moved
        self._database.execute("BEGIN IMMEDIATE")
        return self._database

    # --- in a transaction ---

    def accept(self, entry: Entry, body: bytes, *, everybody: bool, refusal: RequestError | None) -> Entry:
        """Add a request, unless there is one with its key: then that one. Raises `refusal`, if any, for a new one."""
        held = self.find(entry.group, entry.key, everybody=everybody) if entry.key else None
        if held is not None:
            return held
        if refusal is not None:
            raise refusal
        fixed = msgspec.structs.astuple(entry)[1:-2]
        values = (*fixed, seal(body, *fixed), body)
        added = self._database.execute("INSERT INTO requests VALUES (NULL, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", values)
        return msgspec.structs.replace(entry, number=added.lastrowid, size=len(body))

    def keep(self, entry: Entry, body: bytes, answer: bytes) -> None:
        """Add a request that has been answered with status 200."""
        self.answer(self.accept(entry, body, everybody=False, refusal=None), 200, answer)

    def find(self, group: str, name: str, *, everybody: bool) -> Entry | None:
        """The request of a client (of anyone, for `everybody`) with this Idempotency-Key or id."""
        for column in ("key", "id"):
            query = f"{_ENTRIES} WHERE {column} = ? AND {column} != '' AND (? OR owner = ?) ORDER BY number DESC"
            for row in self._database.execute(f"{query} LIMIT 1", (name, everybody, group)):
                return Entry(*row)
        return None

    def pending(self) -> list[Entry]:
        """Those without an answer, in the order in which they were accepted."""
        query = f"{_ENTRIES} WHERE status IS NULL ORDER BY number"
        return [Entry(*row) for row in self._database.execute(query)]

    def request(self, entry: Entry) -> bytes:
        """What was asked. Raises ServerError when it is damaged."""
        return self._sealed(f"SELECT {_FIXED}, seal, body FROM requests WHERE number = ?", entry)

    def reply(self, entry: Entry) -> bytes:
        """What was answered. Raises ServerError when it is damaged."""
        return self._sealed("""SELECT id, digest, status, answers.seal, answers.body FROM answers
            JOIN requests USING (number) WHERE number = ?""", entry)

    def _sealed(self, query: str, entry: Entry) -> bytes:
        """The last column of a row; the one before is the seal of all others. Raises NotFoundError for one that was
        dropped since it was found."""
        row = self._database.execute(query, (entry.number,)).fetchone()
        if row is None:
            raise NotFoundError("It was deleted, or dropped, while it was read.", code="request_not_found")
        *values, sealed, body = row
        if sealed != seal(body, *values):
            raise ServerError("The journal is damaged here; send the request again, with another Idempotency-Key.",
                              code="journal_damaged")
        whole: bytes = body
        return whole

    def answer(self, entry: Entry, status: int, body: bytes) -> None:
        """Keep how it ended; nothing, if the request was dropped meanwhile."""
        values = (status, seal(body, entry.id, entry.digest, status), body, entry.number)
        self._database.execute("INSERT INTO answers SELECT number, ?, ?, ? FROM requests WHERE number = ?", values)

    def drop(self, entry: Entry) -> None:
        """Keep nothing of it."""
        self._database.execute("DELETE FROM requests WHERE number = ?", (entry.number,))

    # --- outside of one ---

    def tidy(self, keep_s: float) -> bool:
        """Drop answers to requests that were accepted more than `keep_s` seconds ago, and the oldest where there is too
        much; give free pages back; sync. True when some were dropped for their size: there may still be too much."""
        dropped = 0
        with self.transaction() as database:
            database.execute("""DELETE FROM requests WHERE number IN (SELECT number FROM requests JOIN answers
                USING (number) WHERE created < ? LIMIT ?)""", (self._clock() - keep_s, ANSWERS_AT_ONCE))
        free, pages, size = (pragma(database, name) for name in ("freelist_count", "page_count", "page_size"))
        if (pages - free) * size > self._max_bytes:
            # Whoever gave an Idempotency-Key was promised the answer; whoever gave none, room permitting.
            with self.transaction():
                dropped = database.execute("""DELETE FROM requests WHERE number IN (SELECT number FROM requests JOIN
                    answers USING (number) WHERE key = '' ORDER BY number LIMIT ?)""", (ANSWERS_AT_ONCE // 8,)).rowcount
        if free * size > MOST_FREE and free > pages // 2:
            database.executescript(f"PRAGMA incremental_vacuum({PAGES_AT_ONCE})")  # `execute` ends after one page
        if self._sync == "everysec":
            database.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
        return dropped > 0

    def size(self) -> int:
        """Bytes on disk."""
        return sum(path.stat().st_size for path in self.path.parent.glob("journal.db*"))

    def close(self) -> None:
        """Sync and close it."""
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
    """What a client hears of it."""
    return JournalError(f"The journal cannot be used, so the request cannot be kept safe: {_why(error)}. Try again "
                        "later, or without Idempotency-Key.", retry_after=30.0, code="journal_unavailable")


def _unusable(why: str) -> ConfigError:
    return ConfigError(f"--journal: {why}", param="journal")
