"""What is known of a batch, and its files while it runs. Calls here read and write the disk."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from tandem.server.batches.files import KEEP_S
from tandem.server.batches.lines import Line, custom_id_of, parse_line, sealed, unsealed
from tandem.system.files import open_private

logger = logging.getLogger(__name__)

MOST_LINES = 50_000
MOST_ERRORS = 100
"""That a batch tells of its file."""
READ_AHEAD, READ_AHEAD_BYTES = 256, 2**22
"""Lines, and about so many bytes, that are read together."""
OPEN = ("validating", "in_progress", "finalizing", "cancelling")
Json = dict[str, Any]


class BatchRecord(Struct, kw_only=True):
    """A batch as it is kept. Times are seconds since 1970."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    expires_at: float
    metadata: dict[str, str] | None = None
    keep_s: float = KEEP_S
    """For how long its results are kept."""
    status: str = "validating"
    end: str = "completed"
    """The status that it is on its way to."""
    times: dict[str, float] = field(default_factory=dict)
    """When it came to each status."""
    errors: list[Json] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    trouble: Json | None = None
    """What keeps it from going on."""

    def shown(self) -> Json:
        """As OpenAI's batch object."""
        names = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        times = {f"{name}_at": int(self.times[name]) if name in self.times else None for name in names}
        errors = [*self.errors, *([self.trouble] if self.trouble else ())]
        return {"id": self.id, "object": "batch", "endpoint": self.endpoint, "status": self.status,
                "errors": {"object": "list", "data": errors} if errors else None,
                "input_file_id": self.input_file_id, "completion_window": self.completion_window,
                "output_file_id": self.output_file_id, "error_file_id": self.error_file_id,
                "created_at": int(self.created_at), "expires_at": int(self.expires_at), **times,
                "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
                "metadata": self.metadata}

    def line_id(self, custom_id: str) -> str:
        """The id of the answer to one of its requests, the same whenever it is asked."""
        return f"batch_req_{_digest(self.id, custom_id)}"

    def file_id(self, kind: str) -> str:
        """The id of the file with its results of a kind, the same whenever it is asked."""
        return f"file-{_digest(self.id, kind)}"


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def fault(code: str, message: str, line: int | None = None, param: str | None = None) -> Json:
    """What is wrong with a batch, as OpenAI's batch object has it."""
    return {"code": code, "line": line, "param": param, "message": message}


def faults(path: Path, endpoint: str, longest: int) -> tuple[int, list[Json]]:
    """How many requests a file has, and what is wrong with it. Raises OSError."""
    seen: set[str] = set()
    found: list[Json] = []
    count = 0
    with path.open("rb") as file:
        for number, raw in enumerate(file, 1):
            blank = not raw.strip()
            count += not blank
            too_long = max(count, number - count) > MOST_LINES
            try:
                if too_long:
                    raise ValueError(f"a file may hold {MOST_LINES} requests, and as many blank lines")
                if blank:
                    continue
                if len(raw) > longest:
                    raise ValueError(f"longer than {longest} bytes (--max-body-mb)")
                line = parse_line(raw)
                if line.url != endpoint:
                    raise ValueError(f"'url' is not the batch's endpoint {endpoint}")
                if line.custom_id in seen:
                    raise ValueError(f"custom_id '{line.custom_id[:100]}' is there twice")
                seen.add(line.custom_id)
            except ValueError as error:
                found.append(fault("invalid_request", f"line {number}: {error}.", number))
                if len(found) == MOST_ERRORS or too_long:
                    break
    if not count:
        found.append(fault("empty_file", "There are no requests in the file.", param="input_file_id"))
    return count, found


def _lines(path: Path) -> Iterator[tuple[bytes, bytes | None]]:
    """Lines of results as they are kept, and without their checksums; None for one that is damaged. Raises OSError."""
    if path.exists():
        with path.open("rb") as file:
            for kept in file:
                yield kept, unsealed(kept)


class FilesLost(Exception):
    """Files of a batch were taken away while it ran."""


class Results:
    """The two files that a batch writes while it runs: answers with status 200, and all others, each line behind its
    checksum."""

    def __init__(self, directory: Path, batch: BatchRecord) -> None:
        self.source = directory / f"{batch.id}.in"
        self.paths = {kind: directory / f"{batch.id}.{kind}" for kind in ("output", "error")}
        self._sizes: dict[str, int] = {}

    def done(self) -> dict[str, set[str]]:
        """Whose answers stand in each; lines that are torn or damaged are taken out, and asked again. Raises OSError.
        """
        found: dict[str, set[str]] = {}
        for kind, path in self.paths.items():
            found[kind], damaged, whole = set(), 0, path.with_suffix(".tmp")
            for _, line in _lines(path):
                if line is None:
                    damaged += 1
                else:
                    found[kind].add(custom_id_of(line))
            if damaged:
                logger.error("%d lines of %s are damaged or torn; computing them again", damaged, path.name)
                with open_private(whole, "wb") as out:
                    out.writelines(kept for kept, line in _lines(path) if line is not None)
                os.replace(whole, path)
            self._sizes[kind] = path.stat().st_size if path.exists() else 0
        return found

    def publish(self, kind: str) -> tuple[Path, int]:
        """Write what the client gets of a kind to a file of its own; where it is, and its size. Raises OSError, also
        for a line that is damaged."""
        path = self.paths[kind].with_suffix(".tmp")
        with open_private(path, "wb") as out:
            for _, line in _lines(self.paths[kind]):
                if line is None:
                    raise OSError(errno.EIO, "a line of results is damaged")
                out.write(line)
            return path, out.tell()

    def check(self) -> None:
        """Raises FilesLost when what was there is not, unless all of the directory is away: that may come back."""
        known = {self.source: 1, **{self.paths[kind]: size for kind, size in self._sizes.items()}}
        with contextlib.suppress(OSError):  # of a disk that fails nothing is known
            if self.source.parent.exists() and any(
                    (path.stat().st_size if path.exists() else 0) < size for path, size in known.items()):
                raise FilesLost

    def append(self, kind: str, lines: bytes) -> None:
        """Add whole lines, in place of what there is of some that could not all be written. Raises OSError, FilesLost.
        """
        lines = b"".join(sealed(line + b"\n") for line in lines.split(b"\n")[:-1])
        size = self._sizes[kind]
        with open_private(self.paths[kind], "ab") as file:
            if file.tell() < size:
                raise FilesLost
            file.truncate(size)
            file.write(lines)
        self._sizes[kind] = size + len(lines)

    def left(self, done: set[str], offset: int) -> tuple[list[tuple[int, Line]], int]:
        """Some requests without an answer from byte `offset` of the file on, none at its end, each with the byte at
        which it begins; and where they end.

        Raises OSError.
        """
        found: list[tuple[int, Line]] = []
        size = 0
        with self.source.open("rb") as file:
            file.seek(offset)
            while len(found) < READ_AHEAD and size < READ_AHEAD_BYTES and (raw := file.readline()):
                if raw.strip() and (line := parse_line(raw)).custom_id not in done:
                    found.append((offset, line))
                    size += len(raw)
                offset += len(raw)
        return found, offset

    def clear(self) -> None:
        """Remove what is left of them; what cannot be removed goes at the next start."""
        for path in (self.source, *self.paths.values()):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
