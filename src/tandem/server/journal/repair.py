"""A journal that a disk has damaged: what can be read of it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from pathlib import Path

from tandem.errors import ConfigError
from tandem.server.journal.database import COLUMNS, PAGE, code_of, connect, first_page

logger = logging.getLogger(__name__)

HEADER = 100
"""Bytes of SQLite's header."""
_CONSTANT = slice(0, 24), slice(44, 92)
_OF_HEADERS = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR, sqlite3.SQLITE_READONLY)
"""What SQLite says of a wrong header, among other things."""
MOST_CHANGED = 512
"""Bytes behind the header in which a first page of ours may differ from a new one's; another database's differs in
more."""


def open_whole(path: Path, *, durable: bool) -> sqlite3.Connection:
    """The database; where it is damaged, one with what can be read of it in its place.

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
    """A file of ours whose header has wrong constants. Raises OSError."""
    if (page := _own_first_page(path)) is None:
        return False
    with path.open("rb") as file:
        there = file.read(HEADER)
    return any(there[part] != page[part] for part in _CONSTANT)


def _own_first_page(path: Path) -> bytes | None:
    """The first page that the file should have, if what is there in its place was one of ours. Raises OSError."""
    page = first_page(path.stat().st_size // PAGE)
    with path.open("rb") as file:
        there = file.read(PAGE)
    changed = sum(a != b for a, b in zip(there[HEADER:], page[HEADER:], strict=False))
    return page if len(there) == PAGE and changed <= MOST_CHANGED else None


def _mend(path: Path, old: sqlite3.Connection | None) -> None:
    """`old` is None when not even its tables can be read."""
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
    with contextlib.closing(connect(new, durable=True)) as database, \
            contextlib.suppress(sqlite3.DatabaseError, ConfigError), \
            contextlib.closing(connect(path, durable=True)) as old:
        kept, lost = _copy(old, database)
    logger.error("%s is damaged: %d of its rows are kept, %d or more are lost; %s is the file as it was",
                 path, kept, lost, copy)
    wal.unlink(missing_ok=True)  # it belongs to the old file
    os.replace(new, path)


def _copy(old: sqlite3.Connection, new: sqlite3.Connection) -> tuple[int, int]:
    """Copy row by row, as a search stops at the first page that is damaged; how many could be read, and could not."""
    kept = lost = 0
    with contextlib.suppress(sqlite3.DatabaseError):
        old.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    new.execute("PRAGMA foreign_keys = OFF")
    with new:
        new.execute("BEGIN IMMEDIATE")
        for table, width in COLUMNS.items():
            for number in _numbers(old):
                try:
                    rows = old.execute(f"SELECT * FROM {table} WHERE number = ?", (number,)).fetchall()
                except sqlite3.DatabaseError:
                    lost += 1
                    continue
                kept += len(rows)
                new.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * width)})", rows)
        # A request whose answer is lost is answered once more.
        new.execute("DELETE FROM answers WHERE number NOT IN (SELECT number FROM requests)")
    return kept, lost


def _numbers(old: sqlite3.Connection) -> range:
    ends: list[int] = []
    for table in COLUMNS:
        for end in ("min", "max"):
            with contextlib.suppress(sqlite3.DatabaseError):
                ends += filter(None, old.execute(f"SELECT {end}(number) FROM {table}").fetchone())
    if not ends:
        return range(0)
    first, last = max(min(ends), 1), max(ends)
    with contextlib.suppress(sqlite3.DatabaseError):  # a number that the disk has changed may be any: none is larger
        last = min(last, *old.execute("SELECT seq FROM sqlite_sequence WHERE name = 'requests'").fetchone() or (last,))
    return range(first, last + 1)
