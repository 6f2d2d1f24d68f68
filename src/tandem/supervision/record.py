"""Background servers: each has a name, and a directory with lock, record and log."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from tandem.config.loading import to_json
from tandem.config.settings import Settings
from tandem.env import state_dir
from tandem.errors import UsageError
from tandem.protocol.codec import UNREADABLE
from tandem.system.files import is_locked, open_private, try_lock, write_private

MOST_LOG_BYTES = 64 * 1024 * 1024
"""Size at which a server's log is rotated; one older log is kept."""
DEFAULT_NAME = "default"
"""Server name that `tandem up` uses without --name."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,31}")
_PATIENCE_S = 0.5
"""Seconds to wait for the lock: `runs` in another process holds it for a moment."""


class Record(Struct, frozen=True):
    """Facts about a background server, written once its port is bound."""

    pid: int
    host: str
    port: int
    model: str
    started_at: float
    drain_timeout: float
    scheme: str = "http"
    settings: str = ""
    """`digest` of its settings."""
    api_key_file: str = ""
    """Absolute path of its API key file; empty for none."""


def digest(settings: Settings) -> str:
    """Return a hash that is equal for equal settings."""
    return hashlib.blake2b(to_json(settings), digest_size=16).hexdigest()


class Background:
    """Directory of one background server. The server holds the lock until it exits for any reason, which frees the name."""

    def __init__(self, name: str) -> None:
        """Set the paths without creating them. Raises UsageError for a name that cannot be a directory's."""
        if not _NAME.fullmatch(name):
            raise UsageError(
                f"--name {name}: use up to 32 letters, digits and ._-, beginning with a letter or digit", param="name"
            )
        self.name = name
        self.path = servers_dir() / name
        self.log = self.path / "log"

    @property
    def down(self) -> str:
        """Command line that ends the server."""
        return "tandem down" if self.name == DEFAULT_NAME else f"tandem down {self.name}"

    def lock(self) -> int:
        """Lock the name; return the descriptor that holds the lock. Raises UsageError if a server holds it."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _PATIENCE_S
        while not try_lock(fd):
            if time.monotonic() > deadline:
                os.close(fd)
                record = self.record()
                what = f" (process {record.pid}, port {record.port}, {record.model})" if record else ""
                raise UsageError(f"{self.name} runs already{what}; `{self.down}` ends it, --name starts another", param="name")
            time.sleep(_PATIENCE_S / 10)
        return fd

    def runs(self) -> bool:
        """Return True while a server holds the lock."""
        return is_locked(self.path / "lock", fcntl.LOCK_SH)

    def record(self) -> Record | None:
        """Return the last record, perhaps that of an ended server; None if there is none or it is unreadable."""
        try:
            return msgspec.json.decode((self.path / "record.json").read_bytes(), type=Record)
        except (FileNotFoundError, *UNREADABLE):
            return None

    def write(self, record: Record) -> None:
        """Write the record atomically. Raises OSError."""
        write_private(self.path / "record.json", msgspec.json.encode(record), sync=False)

    def keep(self, settings: bytes) -> None:
        """Write the settings for `tandem restart`, without API keys. Raises OSError."""
        write_private(self.path / "settings.json", settings, sync=False)

    def kept(self) -> bytes | None:
        """Return the bytes written by `keep`; None if no server of this name was ever started."""
        try:
            return (self.path / "settings.json").read_bytes()
        except FileNotFoundError:
            return None

    def forget(self) -> None:
        """Delete the record."""
        (self.path / "record.json").unlink(missing_ok=True)

    @contextlib.contextmanager
    def fresh_log(self) -> Iterator[int]:
        """Context manager that yields the descriptor of a new log; the previous log becomes `log.1`."""
        with contextlib.suppress(FileNotFoundError):
            self.log.replace(self.path / "log.1")
        fd = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            yield fd
        finally:
            os.close(fd)

    def trim_log(self, most: int = MOST_LOG_BYTES) -> bool:
        """Rotate the log to `log.1` if it exceeds `most` bytes; return True if it did.

        The server keeps appending to the same file: lines written between copy and truncation are lost.
        """
        if not self.log.exists() or self.log.stat().st_size <= most:
            return False
        with open_private(self.path / "log.1", "wb") as old, self.log.open("rb") as log:
            shutil.copyfileobj(log, old)
        os.truncate(self.log, 0)
        return True


def servers_dir() -> Path:
    """Return the parent of all background servers' directories."""
    return state_dir() / "servers"


def known_names() -> list[str]:
    """Return the names of running and earlier background servers, sorted."""
    try:
        return sorted(path.name for path in servers_dir().iterdir() if _NAME.fullmatch(path.name) and path.is_dir())
    except FileNotFoundError:
        return []
