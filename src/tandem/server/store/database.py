"""SQLite database of the journal: tables, durability settings, a checksum per row, and repair.

SQLite pages have no checksums; without one per row, data corrupted by the disk could reach a client.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import sqlite3
from pathlib import Path

import msgspec

from tandem.errors import ConfigError

logger = logging.getLogger(__name__)

NOT_OURS = "is not a journal that this version can read; move it away"
APPLICATION_ID, VERSION = 0x54644A6C, 2
"""SQLite's application_id and user_version of a journal. Version 1 has no table `records`."""
TABLES = {"requests": ("requests", 11), "answers": ("requests", 4), "records": ("records", 5)}
"""For each table, the table whose AUTOINCREMENT numbers its rows, and its number of columns (`number` is the first)."""
_SCHEMA = f"""
PRAGMA application_id = {APPLICATION_ID};
CREATE TABLE requests(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, owner TEXT NOT NULL,
    key TEXT NOT NULL, digest BLOB NOT NULL, route TEXT NOT NULL, created REAL NOT NULL, background INTEGER NOT NULL,
    outline BLOB NOT NULL, seal BLOB NOT NULL, body BLOB NOT NULL);
CREATE TABLE answers(number INTEGER PRIMARY KEY REFERENCES requests ON DELETE CASCADE, status INTEGER NOT NULL,
    seal BLOB NOT NULL, body BLOB NOT NULL);
CREATE UNIQUE INDEX by_id ON requests(id);
CREATE INDEX by_key ON requests(key, owner) WHERE key != '';
CREATE INDEX by_time ON requests(created);
"""
_SINCE_VERSION_1 = f"""
PRAGMA user_version = {VERSION};
CREATE TABLE records(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL,
    seal BLOB NOT NULL, body BLOB NOT NULL);
"""
_VACUUM = "auto_vacuum = INCREMENTAL"
PAGE = 4096
HEADER = 100
"""Size of SQLite's file header in bytes."""
_CONSTANT = slice(0, 24), slice(44, 92)
_OF_HEADERS = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY)
"""SQLite result codes that may mean a corrupt header."""
MOST_CHANGED = 512
"""Most bytes behind the header by which a journal's first page differs from a new one's; other databases differ in more."""


def connect(path: Path, *, durable: bool) -> sqlite3.Connection:
    """Open or create the database, locked exclusively. `durable`: commits survive a power failure.

    Raises ConfigError for a database that is not a journal, OSError, sqlite3.Error.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # SQLite creates its side files with the same mode
    database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        old, version = pragma(database, "schema_version") > 0, pragma(database, "user_version")
        if old and (pragma(database, "application_id") != APPLICATION_ID or not 1 <= version <= VERSION):
            raise ConfigError(f"--journal: {path} {NOT_OURS}", param="journal")
        new = () if old else (_VACUUM,)
        missing = ("" if old else _SCHEMA) + ("" if version == VERSION else _SINCE_VERSION_1)
        for setting in (
            *new,
            "journal_mode = WAL",
            "journal_size_limit = 16777216",
            "foreign_keys = ON",
            "cell_size_check = ON",
            "fullfsync = ON",
            "checkpoint_fullfsync = ON",
            f"synchronous = {'FULL' if durable else 'NORMAL'}",
        ):
            database.execute(f"PRAGMA {setting}").fetchall()
        database.executescript(f"BEGIN IMMEDIATE; {missing} COMMIT")  # takes the exclusive lock
        if old and missing:
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()  # `_wrong_header` reads the file itself
    except BaseException:
        database.close()
        raise
    return database


def first_page(pages: int) -> bytes:
    """Return the first SQLite page (header and schema) of a journal of `pages` pages, with no free pages."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"PRAGMA {_VACUUM}")
        database.executescript(_SCHEMA + _SINCE_VERSION_1)
        page = bytearray(database.serialize()[:PAGE])
    page[18:20] = b"\2\2"  # WAL
    page[28:32] = pages.to_bytes(4, "big")
    return bytes(page)


def pragma(database: sqlite3.Connection, name: str) -> int:
    """Return the value of an integer PRAGMA. Raises sqlite3.Error."""
    value: int = database.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def code_of(error: sqlite3.Error) -> int:
    """Return SQLite's primary result code; 0 for an error of Python's sqlite3 module itself."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def seal(body: bytes, *values: object) -> bytes:
    """Return the 16-byte checksum of a row: its `body` and the other `values`."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=16)
    digest.update(body)
    return digest.digest()


def open_whole(path: Path, *, durable: bool) -> sqlite3.Connection:
    """Open the database; repair a damaged one first, keeping its readable rows.

    Raises ConfigError, OSError, sqlite3.Error.
    """
    database = None
    try:
        database = connect(path, durable=durable)
        if database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",) and not _wrong_header(path):
            return database
    except (sqlite3.DatabaseError, ConfigError) as error:
        code = sqlite3.SQLITE_NOTADB if isinstance(error, ConfigError) else code_of(error)
        if code != sqlite3.SQLITE_CORRUPT and not (code in _OF_HEADERS and _wrong_header(path)):
            raise
    _mend(path, database)
    return connect(path, durable=durable)


def _wrong_header(path: Path) -> bool:
    """Return whether the file is a journal with corrupt constants in its header. Raises OSError."""
    if (page := _own_first_page(path)) is None:
        return False
    with path.open("rb") as file:
        there = file.read(HEADER)
    return any(there[part] != page[part] for part in _CONSTANT)


def _own_first_page(path: Path) -> bytes | None:
    """Return the first page that the file should have; None if it is not a journal. Raises OSError."""
    page = first_page(path.stat().st_size // PAGE)
    with path.open("rb") as file:
        there = file.read(PAGE)
    changed = sum(a != b for a, b in zip(there[HEADER:], page[HEADER:], strict=False))
    return page if len(there) == PAGE and changed <= MOST_CHANGED else None


def _mend(path: Path, old: sqlite3.Connection | None) -> None:
    """Copy a damaged journal aside, then replace it by a new one with its readable rows.

    `old`: the open database, to be closed first; None if it cannot be opened.
    """
    wal, new = path.with_name(path.name + "-wal"), path.with_name("journal.new")
    copy = path.with_name("journal.damaged")
    with contextlib.closing(old) if old is not None else contextlib.nullcontext():
        for source, target in ((path, copy), (wal, path.with_name("journal.damaged-wal"))):
            try:
                target.unlink(missing_ok=True)
                if source.exists():
                    shutil.copy(source, target)
            except OSError as error:
                logger.warning("%s cannot be written: %s; the repair goes on without it", target, error.strerror)
    if (page := _own_first_page(path)) is not None:
        with path.open("r+b") as file:
            file.write(page)
    new.unlink(missing_ok=True)
    kept, lost = 0, 1
    with (
        contextlib.closing(connect(new, durable=True)) as database,
        contextlib.suppress(sqlite3.DatabaseError, ConfigError),
        contextlib.closing(connect(path, durable=True)) as old,
    ):
        kept, lost = _copy(old, database)
    logger.error("%s is damaged: %d of its rows are kept, %d or more are lost; %s is the file as it was", path, kept, lost, copy)
    wal.unlink(missing_ok=True)  # it belongs to the old file
    os.replace(new, path)


def _copy(old: sqlite3.Connection, new: sqlite3.Connection) -> tuple[int, int]:
    """Copy row by row, as a scan stops at the first damaged page; return the numbers of copied and unreadable rows."""
    kept = lost = 0
    with contextlib.suppress(sqlite3.DatabaseError):
        old.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    new.execute("PRAGMA foreign_keys = OFF")
    with new:
        new.execute("BEGIN IMMEDIATE")
        for table, (counter, width) in TABLES.items():
            for number in _numbers(old, counter):
                try:
                    rows = old.execute(f"SELECT * FROM {table} WHERE number = ?", (number,)).fetchall()
                except sqlite3.DatabaseError:
                    lost += 1
                    continue
                kept += len(rows)
                new.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * width)})", rows)
        # Requests without an answer run again; answers without a request are useless.
        new.execute("DELETE FROM answers WHERE number NOT IN (SELECT number FROM requests)")
    return kept, lost


def _numbers(old: sqlite3.Connection, counter: str) -> range:
    """Return the range of row numbers in the tables that `counter` numbers, as far as readable."""
    ends: list[int] = []
    for table in (table for table, (numbered_by, _) in TABLES.items() if numbered_by == counter):
        for end in ("min", "max"):
            with contextlib.suppress(sqlite3.DatabaseError):
                ends += filter(None, old.execute(f"SELECT {end}(number) FROM {table}").fetchone())
    if not ends:
        return range(0)
    first, last = max(min(ends), 1), max(ends)
    with contextlib.suppress(sqlite3.DatabaseError):  # caps corrupted row numbers
        row = old.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (counter,)).fetchone()
        last = min(last, *row or (last,))
    return range(first, last + 1)
