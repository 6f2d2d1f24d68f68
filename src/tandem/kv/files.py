"""Disk blocks as files: layers and heads of one rank, with a checksum. Does not import mlx.

`<directory>/<space>/<name>.<layers>.<heads>.kv`; the space identifies model, adapter and types. A file has a magic number
with the format version, the header length, the header (msgpack), then keys and values of each layer. A rank may assemble a
disk block from files of other ranks with other layers or heads.
"""

from __future__ import annotations

import errno
import math
import os
import re
import secrets
import shutil
import stat
import struct
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from tandem.errors import TransportError
from tandem.kv.parts import KVSlice, sources
from tandem.kv.remote import PARTS, SUFFIX, RemoteStores, files_of
from tandem.protocol.codec import UNREADABLE
from tandem.protocol.kv_blocks import DISK_BLOCK_SIZE, is_checkpoint
from tandem.system.files import NotRegular, file_errors, read_regular

MAGIC = b"TDMKV\0\0\2"
MARK = "tandem-kv"
"""Marker file of Tandem's KV directories."""
IDENTITY = "identity"
"""File with a random id of the directory, equal for all machines that share it."""
MOST_IDENTITY = 64
"""Maximum bytes of the identity file."""
ABOUT = "model"
"""File in each space with the model's name, for users."""
_PREFIX = struct.Struct("<8sI")
_DISK_BLOCK = re.compile(rf"[0-9a-f]{{32}}(00)?\.\d+-\d+\.\d+-\d+\{SUFFIX}$")
MOST_HEADER = 1 << 20
"""Maximum bytes before the arrays of a file."""
STALE_S = 3600.0
"""Age in seconds of abandoned half-written files, and maximum plausible time in the future."""
KEPT = 0.9
"""Fraction of the size limit down to which old files are deleted."""
BLIND = 0.02
"""Fraction of the size limit that a rank writes between scans of the directory."""

Layer = Sequence[np.ndarray]
"""Keys and values of each cache, [1, heads, positions, width], in NumPy types (bfloat16 as uint16); or the arrays of a
checkpoint."""


class _Header(msgspec.Struct):
    space: str
    name: bytes
    part: str
    """Label of its layers and heads."""
    shapes: list[list[list[int]]]
    """Shape of each array of each layer."""
    dtype: str
    """MLX's name of the element type."""
    checksum: int


@dataclass(frozen=True)
class Kind:
    """Element type and shapes of a rank's KV, by its layers."""

    dtype: str
    """MLX's name of the element type of disk blocks."""
    blocks: Sequence[Sequence[tuple[int, int]]]
    """(Heads, width) of each array in disk blocks: keys and values of each cache."""
    checkpoints: Sequence[Sequence[tuple[int, ...]]] = ()
    """Shape in bytes of each array in checkpoints; -1 for a number of positions."""
    whole: frozenset[int] = frozenset()
    """Layers, from 0, that cannot be divided by heads: files serve only ranks with exactly the same heads."""


@dataclass(frozen=True)
class FilePart:
    """Slice of a rank's KV with files of its own, and what these contain; None accepts any."""

    slice: KVSlice
    kind: Kind | None = None


class Unusable(Exception):
    """Raised if a disk block file is missing, damaged or mismatched."""


class Absent(Unusable):
    """Raised if no file of a disk block was known."""


def open_directory(directory: Path, space: str) -> None:
    """Create the directory and its space, or check that the directory is Tandem's. Raises UsageError."""
    with file_errors(f"--kv-disk {directory}: cannot keep KV there", "give another directory", param="kv_disk"):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        _make_space(directory, space)


def _make_space(directory: Path, space: str) -> None:
    """Create a space in an existing directory. Raises OSError, also if the directory is not Tandem's."""
    mark, path = directory / MARK, directory / space
    if not mark.exists():
        if not all(map(_is_ours, directory.iterdir())):
            raise OSError(errno.ENOTEMPTY, "it has other things than Tandem's KV in it")
        _write(mark, "Tandem keeps KV of prompts here. All of it may be deleted at any time.\n")
    path.mkdir(exist_ok=True, mode=0o700)
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{space} in it is a link, and what is behind links is not counted")


def _is_ours(path: Path) -> bool:
    """Return True for a remaining file or space of a directory that was deleted while ranks wrote."""
    if path.is_dir() and not path.is_symlink():
        return all(name in (ABOUT, PARTS) or _DISK_BLOCK.match(name) or name.endswith(".tmp") for name in os.listdir(path))
    return path.name in (MARK, IDENTITY) or path.name.endswith(".tmp")


def _write(path: Path, text: str) -> None:
    """Write a file readable only by the user. Raises OSError."""
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), "w", encoding="utf-8") as file:
        file.write(text)


def _identity(directory: Path, name: str = "") -> str:
    """Return the directory's random id; create it (or set it to `name`) if missing. Empty if hard links are unsupported."""
    path, temporary = directory / IDENTITY, directory / f".{secrets.token_hex(8)}.tmp"
    try:
        if not path.exists():
            _write(temporary, name or secrets.token_hex(16))
            with suppress(FileExistsError):  # another rank may create it first
                os.link(temporary, path)
        return read_regular(path, MOST_IDENTITY).decode("ascii")
    except (OSError, ValueError):
        return ""
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


class DiskBlockFiles:
    """Disk block files of one space, for one rank. Not thread-safe."""

    def __init__(self, directory: Path, space: str, need: KVSlice, limit: int, most: int, kind: Kind | None = None) -> None:
        """Open the directory. `limit`: maximum bytes of all files in `directory`, including other spaces; `most`: of one
        file. Files of another `kind` count as damaged; None accepts any. Raises UsageError."""
        open_directory(directory, space)
        self.part = FilePart(need, kind)
        """Layers and heads of this rank."""
        self._root, self._limit, self._most = directory, limit, most
        self._space = space
        self._path = self.directory = directory / space
        """Directory of this space."""
        identity = _identity(directory)
        self.store_id = f"{identity}/{space}" if identity else ""
        """Id of directory and space, equal on ranks that share it; empty if unknown."""
        self._parts: dict[bytes, list[KVSlice]] = {}
        self._lent: dict[bytes, list[KVSlice]] = {}
        """Slices of each disk block on other machines."""
        self._remote_stores: RemoteStores | None = None
        self.brought = 0
        """Bytes fetched from other machines so far."""
        self._gone: list[bytes] = []
        self._unseen = 0
        """Bytes written since the last scan."""
        self._look()
        self._labels: set[str] = set()
        self._announce(need, *(part for parts in self._parts.values() for part in parts))

    def _announce(self, *parts: KVSlice) -> None:
        """Create the label files of these slices, for ranks that look for single disk blocks. Errors are ignored."""
        for label in {part.label for part in parts} - self._labels:
            with suppress(OSError):
                (self._path / PARTS).mkdir(exist_ok=True, mode=0o700)
                _write(self._path / PARTS / label, "")
                self._labels.add(label)

    def use_remote_stores(self, remote_stores: RemoteStores) -> None:
        """Fetch missing files from `remote_stores`; `survey` queries them and `close` closes them."""
        self._remote_stores = remote_stores

    def close(self) -> None:
        """Close the connections to other machines."""
        if self._remote_stores is not None:
            self._remote_stores.close()

    def names(self, among: Iterable[bytes] | None = None) -> list[bytes]:
        """Return the disk blocks, of `among` or of all, that this rank can assemble."""
        return [name for name in ({**self._parts, **self._lent} if among is None else among) if self._sources(name) is not None]

    def lent(self, among: Iterable[bytes] | None = None) -> list[bytes]:
        """Return the disk blocks, of `among` or of all, for which this rank needs remote files."""
        return [
            name
            for name in (self._lent if among is None else among)
            if any(part not in self._parts.get(name, ()) for layer in self._sources(name) or () for part, _ in layer)
        ]

    def _sources(self, name: bytes, wanted: FilePart | None = None) -> list[list[tuple[KVSlice, range]]] | None:
        """Return for each layer the slices to read, and which of their heads; None if some are missing."""
        wanted = wanted or self.part
        whole = wanted.kind.whole if wanted.kind else frozenset()
        return sources(wanted.slice, tuple(self._parts.get(name, ())), tuple(self._lent.get(name, ())), whole)

    def read(self, name: bytes, wanted: FilePart | None = None) -> tuple[list[Layer], str, int]:
        """Return keys and values of each layer of `wanted` (the rank's own part if None), MLX's name of their type, and the
        bytes read. Raises Unusable."""
        wanted = wanted or self.part
        sources = self._sources(name, wanted)
        if sources is None:
            raise Absent("it is not there")
        files: dict[str, tuple[_Header, list[Layer]]] = {}
        for part, _ in (one for layer in sources for one in layer):
            if part.label not in files:
                try:
                    files[part.label] = self._load(name, part, wanted)
                except Unusable:
                    for known in (self._parts, self._lent):
                        known[name] = [one for one in known.get(name, []) if one != part]
                    raise
        layers = []
        for layer, taken in zip(wanted.slice.layers, sources, strict=True):
            parts = [_heads(files[part.label][1][layer - part.layers.start], part, heads) for part, heads in taken]
            layers.append(parts[0] if len(parts) == 1 else [np.concatenate(sides, axis=1) for sides in zip(*parts, strict=True)])
        types = {header.dtype for header, _ in files.values()}
        if len(types) > 1:
            raise Unusable(f"its parts are of several types: {sorted(types)}")
        return layers, types.pop(), sum(array.nbytes for _, held in files.values() for layer in held for array in layer)

    def _load(self, name: bytes, part: KVSlice, wanted: FilePart) -> tuple[_Header, list[Layer]]:
        path = self._path / _file(name, part)
        try:  # another rank of this machine may have fetched a remote file meanwhile
            borrowed = part not in self._parts.get(name, []) and not path.exists()
            data = self._bring(path.name) if borrowed else self._bytes(path)
            magic, length = _PREFIX.unpack_from(data.ljust(_PREFIX.size, b"\0"))  # of a file that ends too early too
            header = msgspec.msgpack.decode(data[_PREFIX.size : _PREFIX.size + length], type=_Header)
            payload = memoryview(data)[_PREFIX.size + length :]
            if (
                magic != MAGIC
                or (header.space, header.name, header.part) != (self._space, name, part.label)
                or len(header.shapes) != len(part.layers)
                or zlib.crc32(payload) != header.checksum
            ):
                raise ValueError("it is not what it should be")
            layers = _arrays(payload, header)
            _require_kind(header, part, wanted)
            if borrowed:
                with suppress(OSError):  # storing it locally is optional
                    self._put(name, part, [data])
            return header, layers
        except TransportError as error:
            raise Unusable(f"{path.name}: {error.message}") from error
        except OSError as error:
            raise Unusable(f"{path.name}: {error.strerror or error}") from error
        except (*UNREADABLE, ValueError, struct.error) as error:
            with suppress(OSError):
                path.unlink()
            raise Unusable(f"{path.name} is damaged: {error}") from error

    def _bring(self, file: str) -> bytes:
        """Fetch a file from another machine, counting its bytes. Raises TransportError."""
        assert self._remote_stores is not None
        data = self._remote_stores.fetch(file)
        self.brought += len(data)
        return data

    def _bytes(self, path: Path) -> bytes:
        """Read a file and update its time of last use. Raises OSError, and ValueError if it is not a regular file."""
        try:
            data = read_regular(path, self._most)
        except NotRegular as error:
            raise ValueError("it is no disk block") from error
        with suppress(OSError):  # a read-only disk is acceptable
            os.utime(path)
        return data

    def write(self, name: bytes, layers: list[Layer], dtype: str, part: FilePart | None = None) -> int:
        """Write `part` of a disk block (None: this rank's); return the bytes written. Raises OSError, with nothing left
        behind."""
        own = (part or self.part).slice
        blocks = [np.ascontiguousarray(array) for layer in layers for array in layer]
        checksum = 0
        for block in blocks:
            checksum = zlib.crc32(block.data, checksum)
        shapes = [[list(array.shape) for array in layer] for layer in layers]
        header = msgspec.msgpack.encode(_Header(self._space, name, own.label, shapes, dtype, checksum))
        return self._put(name, own, [_PREFIX.pack(MAGIC, len(header)) + header, *(one.data for one in blocks)])

    def _put(self, name: bytes, part: KVSlice, contents: Iterable[bytes | memoryview]) -> int:
        """Write a file and return its size. Raises OSError, with nothing left behind."""
        if self._path.is_symlink() or not self._path.exists():
            _make_space(self._root, self._space)
            self._labels.clear()
            if self.store_id:  # engines started later then share the id with running ones
                _identity(self._root, self.store_id.partition("/")[0])
        self._announce(part)
        temporary = self._path / f".{secrets.token_hex(8)}.tmp"
        try:
            with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                for content in contents:
                    file.write(content)
                size = file.tell()
            os.replace(temporary, self._path / _file(name, part))
        except BaseException as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    self._look(full=True)
            raise
        if part not in self._parts.setdefault(name, []):
            self._parts[name].append(part)
        self._unseen += size
        if self._unseen > BLIND * self._limit:
            self._look()
        return size

    def _look(self, *, full: bool = False) -> tuple[int, int]:
        """Scan the directory. If it exceeds the limit, or the disk is `full`, delete the least recently used files of any
        space until a tenth is free. Return the bytes of this space, and of all spaces."""
        files = sorted(self._all())
        total = sum(size for _, size, _, _ in files)
        room = KEPT * self._limit if total > self._limit else float(total)
        if full:  # another rank may have freed space already
            room = min(room, KEPT * total + shutil.disk_usage(self._root).free)
        self._parts, before = {}, self._parts
        own = 0
        for _, size, space, file in files:
            if total > room:
                with suppress(OSError):
                    (self._root / space / file).unlink(missing_ok=True)
                    total -= size
            elif space == self._space:
                _note(self._parts, file)
                own += size
        self._gone += [name for name, parts in before.items() if not set(parts) <= set(self._parts.get(name, ()))]
        self._unseen = 0
        return own, total

    def survey(self, *, drop: bool = False, wanted: Sequence[bytes] | None = None) -> tuple[int, int]:
        """Scan the files; with `drop` delete all of this space first. Return (bytes of this space or deleted bytes, remaining
        bytes of all spaces).

        With `wanted`, only these disk blocks are deleted and looked up, here and remotely, and sizes are not counted. Raises
        OSError.
        """
        dropped, stems = 0, None if wanted is None else {name.hex() for name in wanted}
        if drop:
            with suppress(FileNotFoundError):  # the whole directory may be missing
                for file, status in files_of(self._path, stems):
                    with suppress(OSError):  # another rank may delete them too
                        (self._path / file).unlink()
                        dropped += status.st_size
        own = total = 0
        if wanted is None:
            own, total = self._look()
            self._lent.clear()
        else:
            for name in wanted:
                self._parts.pop(name, None)
                self._lent.pop(name, None)
            for file, _ in files_of(self._path, stems):
                _note(self._parts, file)
        if self._remote_stores is not None and not drop:  # other ranks drop their files at the same time
            for file, size in self._remote_stores.look(stems):
                if size <= self._most:
                    _note(self._lent, file)
        return dropped if drop else own, total

    def take_gone(self) -> list[bytes]:
        """Return the disk blocks that lost a file since the last call, and reset the list."""
        gone, self._gone = self._gone, []
        return gone

    def _all(self) -> Iterator[tuple[float, int, str, str]]:
        """Yield (time of last use, bytes, space, name) of every file. Delete abandoned half-written files."""
        now = time.time()
        for space, file in _files(self._root):
            half = file.name.startswith(".") and file.name.endswith(".tmp")
            if not half and not file.name.endswith(SUFFIX):
                continue
            with suppress(OSError):  # another rank may delete it just now
                status = file.stat(follow_symlinks=False)
                ahead = status.st_mtime - now
                if stat.S_ISREG(status.st_mode) and not half:
                    wrong = ahead > STALE_S or status.st_size > self._limit
                    yield 0.0 if wrong else status.st_mtime, status.st_size, space, file.name
                elif half and abs(ahead) > STALE_S:
                    os.unlink(file)


def _require_kind(header: _Header, part: KVSlice, wanted: FilePart) -> None:
    """Raise ValueError if type or shapes differ from the model's, so the KV is unusable."""
    checkpoint, kind = is_checkpoint(header.name), wanted.kind
    if not checkpoint and any(len(one) != 4 or one[2] != DISK_BLOCK_SIZE for layer in header.shapes for one in layer):
        raise ValueError("its arrays are not those of a disk block")
    dtype = "uint8" if checkpoint else kind.dtype if kind else header.dtype
    if header.dtype != dtype:
        raise ValueError(f"type {header.dtype}, where the model has {dtype}")
    for i, layer in enumerate(wanted.slice.layers):
        if layer not in part.layers:
            continue
        shapes = header.shapes[layer - part.layers.start]
        expected: list[tuple[int, ...]]
        if kind is None:
            expected = [(1, len(part.heads), DISK_BLOCK_SIZE, max(shape[3], 1)) for shape in shapes]
        elif checkpoint:
            expected = list(kind.checkpoints[i])
        else:
            expected = [(1, heads, DISK_BLOCK_SIZE, width) for heads, width in kind.blocks[i]]
        if kind is not None and i not in kind.whole:
            expected = [(1, len(part.heads), *shape[2:]) for shape in expected]
        alike = len(shapes) == len(expected) and all(
            len(shape) == len(of) and all(number == size or size < 0 for number, size in zip(shape, of, strict=True))
            for shape, of in zip(shapes, expected, strict=True)
        )
        if not alike:
            raise ValueError(f"layer {layer} has shapes {shapes}, where the model has {expected}")


def _files(root: Path) -> Iterator[tuple[str, os.DirEntry[str]]]:
    for space in os.scandir(root):
        if space.is_dir(follow_symlinks=False):
            with suppress(OSError), os.scandir(space) as files:
                for file in files:
                    yield space.name, file


def _note(parts: dict[bytes, list[KVSlice]], file: str) -> None:
    """Add the slice of the file with this name, if it is a disk block file."""
    name, _, label = file.removesuffix(SUFFIX).partition(".")
    with suppress(ValueError, OverflowError):
        part = KVSlice.read(label)
        if len(part.layers) and len(part.heads) and file == _file(bytes.fromhex(name), part):
            parts.setdefault(bytes.fromhex(name), []).append(part)


def _file(name: bytes, part: KVSlice) -> str:
    return f"{name.hex()}.{part.label}{SUFFIX}"


def _heads(layer: Layer, part: KVSlice, heads: range) -> Layer:
    if len(heads) == len(part.heads):
        return layer
    return [array[:, heads.start : heads.stop] for array in layer]


_NUMPY: dict[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(np.uint16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
}


def _arrays(payload: memoryview, header: _Header) -> list[Layer]:
    """Parse the layers of a payload. Raises ValueError if the bytes do not match the header."""
    dtype, at = _NUMPY.get(header.dtype), 0
    if dtype is None:
        raise ValueError(f"type {header.dtype}")
    shapes = [shape for layer in header.shapes for shape in layer]
    if any(number < 0 for shape in shapes for number in shape) or sum(map(math.prod, shapes)) * dtype.itemsize != len(payload):
        raise ValueError("its arrays are not those of its header")
    layers: list[Layer] = []
    for held in header.shapes:
        arrays = []
        for shape in held:
            arrays.append(np.ndarray(shape, dtype, payload, at))
            at += arrays[-1].nbytes
        layers.append(arrays)
    return layers


def note_model(directory: Path, space: str, model: str) -> None:
    """Write the model's name into a space. Errors are ignored."""
    path = directory / space / ABOUT
    with suppress(OSError):
        if not path.exists():
            _write(path, model)
