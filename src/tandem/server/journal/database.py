"""The journal's database: its tables, the settings on which its promises rest, and a checksum for each row.

SQLite's pages have none: without it, what a disk has changed would be shown to a client.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sqlite3
from pathlib import Path

import msgspec

from tandem.errors import ConfigError

NOT_OURS = "is not a journal that this version can read; move it away"
_MARKS = (0x54644A6C, 1)
"""application_id and user_version, by which a file is known as ours."""
COLUMNS = {"requests": 11, "answers": 4}
"""How many each table has; the first is the number of the request."""
_SCHEMA = f"""
PRAGMA application_id = {_MARKS[0]};
PRAGMA user_version = {_MARKS[1]};
CREATE TABLE requests(number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL, owner TEXT NOT NULL,
    key TEXT NOT NULL, digest BLOB NOT NULL, route TEXT NOT NULL, created REAL NOT NULL, background INTEGER NOT NULL,
    outline BLOB NOT NULL, seal BLOB NOT NULL, body BLOB NOT NULL);
CREATE TABLE answers(number INTEGER PRIMARY KEY REFERENCES requests ON DELETE CASCADE, status INTEGER NOT NULL,
    seal BLOB NOT NULL, body BLOB NOT NULL);
CREATE UNIQUE INDEX by_id ON requests(id);
CREATE INDEX by_key ON requests(key, owner) WHERE key != '';
CREATE INDEX by_time ON requests(created);
"""
_VACUUM = "auto_vacuum = INCREMENTAL"
PAGE = 4096


def connect(path: Path, *, durable: bool) -> sqlite3.Connection:
    """The database, which nobody else can use then. With `durable`, what is committed outlives the machine's power.

    Raises ConfigError for a database of another kind, OSError, sqlite3.Error.
    """
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL, 0o600))  # what SQLite makes beside it is as private
    database = sqlite3.connect(path, timeout=1.0, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA locking_mode = EXCLUSIVE").fetchall()
        old = pragma(database, "schema_version") > 0
        if old and (pragma(database, "application_id"), pragma(database, "user_version")) != _MARKS:
            raise ConfigError(f"--journal: {path} {NOT_OURS}", param="journal")
        new = () if old else (_VACUUM,)
        for setting in (*new, "journal_mode = WAL", "journal_size_limit = 16777216", "foreign_keys = ON",
                        "cell_size_check = ON", "fullfsync = ON", "checkpoint_fullfsync = ON",
                        f"synchronous = {'FULL' if durable else 'NORMAL'}"):
            database.execute(f"PRAGMA {setting}").fetchall()
        database.executescript(f"BEGIN IMMEDIATE; {'' if old else _SCHEMA} COMMIT")  # takes the lock, and keeps it
    except BaseException:
        database.close()
        raise
    return database


def first_page(pages: int) -> bytes:
    """SQLite's first page, with header and schema, of a journal of so many pages. None of them counts as free."""
    with contextlib.closing(sqlite3.connect(":memory:")) as database:
        database.execute(f"PRAGMA {_VACUUM}")
        database.executescript(_SCHEMA)
        page = bytearray(database.serialize()[:PAGE])
    page[18:20] = b"\2\2"  # WAL
    page[28:32] = pages.to_bytes(4, "big")
    return bytes(page)


def pragma(database: sqlite3.Connection, name: str) -> int:
    """A number that SQLite has of the database. Raises sqlite3.Error."""
    value: int = database.execute(f"PRAGMA {name}").fetchone()[0]
    return value


def code_of(error: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 for an error of Python's module."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def seal(body: bytes, *values: object) -> bytes:
    """A checksum of a row, 16 bytes."""
    digest = hashlib.blake2b(msgspec.msgpack.encode(values), digest_size=16)
    digest.update(body)
    return digest.digest()
