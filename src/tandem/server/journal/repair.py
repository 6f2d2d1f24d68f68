"""A journal that a disk has damaged: what can be read of it goes on."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sqlite3
from pathlib import Path

from tandem.server.journal.database import COLUMNS, code_of, connect

logger = logging.getLogger(__name__)


def open_whole(path: Path, *, durable: bool) -> sqlite3.Connection:
    """The database; where it is damaged, one with what can be read of it in its place.

    Raises ConfigError, OSError, sqlite3.Error.
    """
    database = None
    try:
        database = connect(path, durable=durable)
        if database.execute("PRAGMA integrity_check(1)").fetchone() == ("ok",):
            return database
    except sqlite3.DatabaseError as error:
        if code_of(error) != sqlite3.SQLITE_CORRUPT:
            raise
    _mend(path, database)
    return connect(path, durable=durable)


def _mend(path: Path, old: sqlite3.Connection | None) -> None:
    """`old` is None when not even its tables can be read."""
    copy, new = path.with_name("journal.damaged"), path.with_name("journal.new")
    new.unlink(missing_ok=True)
    kept, lost = 0, 1
    with contextlib.closing(connect(new, durable=True)) as database:
        if old is not None:
            with contextlib.closing(old):
                kept, lost = _copy(old, database)
    logger.error("%s is damaged: %d of its rows are kept, %d or more are lost; %s is the file as it was",
                 path, kept, lost, copy)
    try:
        shutil.copy(path, copy)
    except OSError as error:
        logger.warning("%s cannot be written: %s; the repair goes on without it", copy, error.strerror)
    path.with_name(path.name + "-wal").unlink(missing_ok=True)  # it belongs to the old file
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
