"""Clean-up of temporary files of killed processes, done by the next process that creates temporary files."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

KEPT_S = 3600.0
"""Minimum age of removed files in seconds: in a container the creating process may run without being visible."""
_NAME = re.compile(r"tandem-[a-z]+-(\d+)-.*")


def temporary_prefix(kind: str) -> str:
    """Return a `tempfile` prefix that holds this process's id. First remove this user's leftovers."""
    sweep(Path(tempfile.gettempdir()))
    return f"tandem-{kind}-{os.getpid()}-"


def sweep(directory: Path) -> None:
    """Remove files of this user's ended processes from `directory`. Never raises OSError."""
    with suppress(OSError):
        for entry in os.scandir(directory):
            match = _NAME.fullmatch(entry.name)
            with suppress(OSError):
                info = entry.stat(follow_symlinks=False)
                if match and info.st_uid == os.getuid() and time.time() - info.st_mtime > KEPT_S and not _runs(int(match[1])):
                    if entry.is_dir(follow_symlinks=False):
                        shutil.rmtree(entry.path, ignore_errors=True)
                    else:
                        os.unlink(entry.path)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (OSError, OverflowError) as error:
        return isinstance(error, PermissionError)
    return True
