"""Partial copies of models on machines without the model files: parts are fetched, verified, resumed, and shared. No mlx.

`<cache>/slices/<fingerprint>/` holds one model's config and tokenizer. Its directory `headers/` has the header of each
weight file, and `parts/` the parts that this machine's ranks have needed. An unfinished part is `NAME.partial`, with a
journal of checksums of its chunks. The rank that fetches it holds a file lock, so that several ranks share the work. It
is renamed when complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, Protocol

from tandem.checkpoints.files import ModelFiles, Progress, counter, read_headers
from tandem.checkpoints.safetensors import header_length, read_header
from tandem.checkpoints.stored import used
from tandem.env import cache_dir
from tandem.errors import BrokenModel, UsageError
from tandem.models.description import describe
from tandem.models.slices import PartPlan, Span, chunks, plan_parts
from tandem.protocol.blob_messages import BlobFile, Range
from tandem.system.files import file_errors, try_lock
from tandem.transport.blobs import CHUNK, checksum

POLL_S = 0.2
"""Seconds between checks whether another rank has finished a part."""
_NOT_KEPT = "cannot keep the weights here"
_REMEDY = "free some space, or set TANDEM_CACHE to a directory with enough of it"


class Source(Protocol):
    """A remote machine that has the model's files."""

    def files(self) -> list[BlobFile]:
        """List the model's files on that machine."""
        ...

    def read(self, ranges: Sequence[Range]) -> Iterator[tuple[int, memoryview, bytes]]:
        """Yield (index into `ranges`, bytes, checksum) for each range, in any order."""
        ...


def fetch_slice(
    source: Source,
    name: str,
    layers: range,
    progress: Progress | None = None,
    *,
    limit: int = CHUNK,
    mtp: bool = False,
    vision: bool = True,
    accept: Callable[[ModelFiles], None] = lambda files: None,
) -> ModelFiles:
    """Fetch the parts of model `name` that a stage with `layers` needs, unless this machine has them already.

    `limit` is the most bytes per request; `mtp`: with the draft head; `vision`: with the vision tower.
    `accept` is called once the headers are present,
    and may raise to refuse.
    Raise `BrokenModel` for files that are not a model's, UsageError if they cannot be stored here, and the source's
    errors.
    """
    files = _checked(source.files(), name)
    weights = [file for file in files if file.name.endswith(".safetensors")]
    root = cache_dir() / "slices" / _fingerprint(weights)
    with file_errors(f"{root}: {_NOT_KEPT}", _REMEDY, param="weights_from"):
        (root / "headers").mkdir(parents=True, exist_ok=True)
        (root / "parts").mkdir(exist_ok=True)
        _fetch_whole(source, [file for file in files if file not in weights], root)
        _fetch_headers(source, weights, root / "headers")
        here = ModelFiles(root, name, headers=root / "headers")
        accept(here)
        plans = plan_parts(read_headers(here), layers, describe(here, vision=vision), mtp=mtp)
        _fetch_parts(source, plans, root / "parts", progress, limit)
        used(root)
    return replace(here, weights=tuple(root / "parts" / plan.name for plan in plans))


def fetch_files(source: Source, kind: str) -> Path:
    """Fetch all files of a small directory (a LoRA adapter's), and return where they are, below `kind` in the cache.

    Raise UsageError if they cannot be stored here, and the source's errors.
    """
    files = _checked(source.files(), kind)
    root = cache_dir() / kind / _fingerprint(files)
    with file_errors(f"{root}: {_NOT_KEPT}", _REMEDY, param="weights_from"):
        root.mkdir(parents=True, exist_ok=True)
        _fetch_whole(source, files, root)
    with suppress(OSError):  # another user's
        os.utime(root)
    return root


def _checked(files: list[BlobFile], name: str) -> list[BlobFile]:
    for file in files:
        if not file.name or Path(file.name).name != file.name or file.name.startswith(".") or "\0" in file.name:
            raise BrokenModel(f"{name}: {file.name!r} is not a name for a file of a model")
    return files


def _fingerprint(weights: Sequence[BlobFile]) -> str:
    digest = hashlib.blake2b(digest_size=12)
    for file in sorted(weights, key=lambda file: file.name):
        digest.update(f"{file.name}\0{file.size}\0{file.mtime_ns}\0{file.sample}\n".encode())
    return digest.hexdigest()


def _fetch_whole(source: Source, files: Sequence[BlobFile], root: Path) -> None:
    """Fetch config, tokenizer and other small files, except those with the same size and mtime here."""
    for file in files:
        with suppress(FileNotFoundError):
            status = (root / file.name).stat()
            if (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns):
                continue
        data = read_ranges(source, [Range(file.name, 0, file.size)])[0]
        _write(root / file.name, data, file.mtime_ns)


def _fetch_headers(source: Source, weights: Sequence[BlobFile], directory: Path) -> None:
    missing = [file.name for file in weights if not (directory / file.name).is_file()]
    if not missing:
        return
    starts = read_ranges(source, [Range(name, 0, 8) for name in missing])
    try:
        lengths = [header_length(bytes(start)) for start in starts]
    except ValueError as error:
        raise BrokenModel(f"a weight file {error}") from error
    rests = read_ranges(source, [Range(name, 8, length - 8) for name, length in zip(missing, lengths, strict=True)])
    for name, start, rest in zip(missing, starts, rests, strict=True):
        _write(directory / name, start + rest)


def read_ranges(source: Source, wanted: Sequence[Range]) -> list[bytearray]:
    """Return the bytes of each range; long ranges are read in several chunks. Raises the source's errors."""
    whole = [bytearray(one.length) for one in wanted]
    places = [(one, data, at) for one, data in zip(wanted, whole, strict=True) for at in range(0, one.length, CHUNK)]
    ranges = [Range(one.name, one.offset + at, min(CHUNK, one.length - at)) for one, _, at in places]
    for index, part, _ in source.read(ranges):
        _, data, at = places[index]
        data[at : at + CHUNK] = part
    return whole


def _write(path: Path, data: bytearray, mtime_ns: int | None = None) -> None:
    handle, scratch = tempfile.mkstemp(prefix=".", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if mtime_ns is not None:
            os.utime(scratch, ns=(mtime_ns, mtime_ns))
        os.replace(scratch, path)
    except BaseException:
        os.unlink(scratch)
        raise


def _fetch_parts(source: Source, plans: Sequence[PartPlan], directory: Path, progress: Progress | None, limit: int) -> None:
    total = sum(plan.size for plan in plans)
    add = counter(progress, total)
    waiting = [plan for plan in plans if not _complete(directory / plan.name, plan.size)]
    add(total - sum(plan.size for plan in waiting))
    _require_space(directory, waiting)
    while waiting:
        # Parts that another rank of this machine is fetching are retried later.
        waiting = [plan for plan in waiting if not _fetch_part(source, plan, directory, add, limit)]
        if waiting:
            time.sleep(POLL_S)


def _require_space(directory: Path, plans: Sequence[PartPlan]) -> None:
    need = sum(plan.size for plan in plans)
    for plan in plans:
        with suppress(FileNotFoundError):
            need -= (directory / f"{plan.name}.partial").stat().st_blocks * 512
    free = shutil.disk_usage(directory).free
    if need > free:
        raise UsageError(
            f"{directory}: {need / 2**20:.0f} MiB of weights do not fit into the "
            f"{free / 2**20:.0f} MiB that are free; free some, or set TANDEM_CACHE to a directory with "
            "enough of it",
            param="weights_from",
        )


def _complete(path: Path, size: int) -> bool:
    try:
        return path.stat().st_size == size
    except FileNotFoundError:
        return False


def _fetch_part(source: Source, plan: PartPlan, directory: Path, add: Callable[[int], None], limit: int) -> bool:
    """Fetch the missing chunks of a part; return False if another rank is fetching it."""
    target, partial = directory / plan.name, directory / f"{plan.name}.partial"
    if _complete(target, plan.size):
        add(plan.size)
        return True
    file = _claim(partial)
    if file is None:
        return False
    with file:
        if _complete(target, plan.size):  # completed since the check above
            partial.unlink()
            add(plan.size)
            return True
        with _ChunksOnDisk(directory / f"{plan.name}.journal", plan, file, limit) as journal:
            os.pwrite(file.fileno(), plan.header, 0)
            add(len(plan.header) + journal.done)
            missing = journal.missing
            ranges = [Range(span.file, span.start, span.length) for span in missing]
            for index, data, digest in source.read(ranges):
                _write_at(file, data, missing[index].target)
                journal.note(missing[index], digest)
                add(missing[index].length)
            os.ftruncate(file.fileno(), plan.size)
            os.fsync(file.fileno())
            read_header(partial)
            os.replace(partial, target)
            journal.remove()
    return True


def _claim(path: Path) -> BinaryIO | None:
    """Open and lock `path`, creating it if needed; None if another process holds or has just finished it."""
    file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644), "r+b", buffering=0)
    with suppress(FileNotFoundError):
        if try_lock(file) and os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()
    return None


def _write_at(file: BinaryIO, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(file.fileno(), data, offset)
        data, offset = data[written:], offset + written


class _ChunksOnDisk:
    """Journal of the chunks of a part on disk. Entries of an earlier run count only if the bytes match their checksum."""

    def __init__(self, path: Path, plan: PartPlan, file: BinaryIO, limit: int) -> None:
        self._path = path
        pieces = chunks(plan.spans, limit)
        key = checksum(plan.header + repr(pieces).encode()).hex()
        noted = self._noted(key)
        self.missing: list[Span] = []
        self.done = 0
        for span in pieces:
            if noted.get(span.target) == checksum(os.pread(file.fileno(), span.length, span.target)).hex():
                self.done += span.length
            else:
                self.missing.append(span)
        self._file = path.open("a" if noted else "w", encoding="ascii")
        if not noted:
            self._file.write(f"{key}\n")

    def _noted(self, key: str) -> dict[int, str]:
        try:
            first, *lines = self._path.read_text(encoding="ascii", errors="replace").split("\n")[:-1]
        except (FileNotFoundError, ValueError):
            return {}
        entries = [line.split() for line in lines] if first == key else []
        return {int(entry[0]): entry[1] for entry in entries if len(entry) == 2 and entry[0].isdecimal()}

    def note(self, span: Span, digest: bytes) -> None:
        """Record that `span` has been written."""
        self._file.write(f"{span.target} {digest.hex()}\n")
        self._file.flush()

    def remove(self) -> None:
        """Delete the journal of a complete part."""
        self._path.unlink()

    def __enter__(self) -> _ChunksOnDisk:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
