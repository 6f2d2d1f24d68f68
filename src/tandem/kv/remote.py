"""Remote KV: transfer of disk block files between machines, for ranks with the keys."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

from msgspec import Struct

from tandem.errors import TransportError
from tandem.protocol.blob_messages import BlobFile, Range
from tandem.protocol.keys import ClusterKeys
from tandem.system.files import NotRegular, open_regular
from tandem.transport.blobs import CHUNK, BlobClient, BlobServer, NotServed, checksum

PATIENCE_S = 5.0
"""Timeout in seconds of a chunk, or of all file lists. Missing blocks are computed."""
REST_S = 30.0
"""Seconds for which an unresponsive endpoint is not asked."""
MOST_LISTED = 50_000
"""Maximum files in a list, since messages are limited in size."""
MOST_STEMS = 5000
"""Maximum stems in one request; with more, all files are listed."""
SUFFIX = ".kv"
"""Suffix of disk block files."""
PARTS = "parts"
"""Subdirectory with an empty file for each label used in file names."""


def files_of(directory: Path, stems: Collection[str] | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield (name, status) of the disk block files in a directory: all, or those named `STEM.*` without listing the
    directory. Raises OSError."""
    if stems is None:
        names = os.listdir(directory)
    else:  # `PARTS` has a file for each label, which stands between stem and suffix
        labels = os.listdir(directory / PARTS) if (directory / PARTS).exists() else []
        names = [f"{stem}.{label}{SUFFIX}" for label in labels for stem in set(stems)]
    for name in filter(_is_name, names):
        with suppress(OSError):  # the file may be missing or deleted just now
            status = os.stat(directory / name, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield name, status


class Lending(Struct, frozen=True):
    """Keys and address for KV transfers of a rank, as server and client."""

    keys: ClusterKeys
    host: str
    """Address of the rank's machine to listen on."""


class DiskBlockServer(BlobServer):
    """Server of the disk block files currently in a directory, and of no other files."""

    def __init__(self, directory: Path, lending: Lending) -> None:
        """Listen on a free port. Raises TransportError if the address is not usable."""
        self._directory = directory
        super().__init__((), lending.keys, lending.host)

    def listed(self, stems: Collection[str] | None) -> list[BlobFile]:
        """List the files with these stems, or all. Raises OSError."""
        return [
            BlobFile(name, status.st_size, status.st_mtime_ns, "")
            for name, status in islice(files_of(self._directory, stems), MOST_LISTED)
        ]

    def chunk(self, wanted: Range) -> tuple[bytes, bytes]:
        """Return checksum and bytes of a range. Raises OSError, and TransportError for a range that is not served."""
        if not _is_name(wanted.name) or not 0 < wanted.length <= CHUNK or wanted.offset < 0:
            raise TransportError(f"{wanted.name!r} is not lent")
        try:
            with open_regular(self._directory / wanted.name, os.O_NOFOLLOW) as file:
                there = wanted.offset + wanted.length <= os.fstat(file.fileno()).st_size
                data = os.pread(file.fileno(), wanted.length, wanted.offset) if there else b""
        except NotRegular:
            raise TransportError(f"{wanted.name} is no file") from None
        if len(data) != wanted.length:
            raise TransportError(f"{wanted.name} has changed")
        return checksum(data), data


def _is_name(name: str) -> bool:
    """Return True for the name of a disk block file."""
    return name.isascii() and name.endswith(SUFFIX) and not name.startswith(".") and "/" not in name and "\0" not in name


class RemoteStores:
    """Disk block files on other machines. Not thread-safe."""

    def __init__(self, keys: ClusterKeys, endpoints: Iterable[str] = ()) -> None:
        self._keys = keys
        self._clients: dict[str, BlobClient] = {}
        self._where: dict[str, dict[str, tuple[str, int]]] = {}
        """(Endpoint, size) of each remote file, by stem and name."""
        self._resting: dict[str, float] = {}
        """Endpoints that are not asked until a time in seconds of `time.monotonic`."""
        self.change(endpoints)

    def change(self, endpoints: Iterable[str]) -> None:
        """Replace the endpoints."""
        named = set(endpoints)
        for endpoint in self._clients.keys() - named:
            self._leave(endpoint)
            self._resting.pop(endpoint, None)
        self._clients |= {endpoint: self._client(endpoint) for endpoint in named - self._clients.keys()}

    def look(self, stems: Collection[str] | None = None) -> list[tuple[str, int]]:
        """Query all endpoints for the files with these stems, or all; return names and sizes. Unresponsive endpoints count as
        empty."""
        for stem in list(self._where) if stems is None else stems:
            self._where.pop(stem, None)
        now = time.monotonic()
        some = None if stems is not None and len(stems) > MOST_STEMS else stems
        asked = [
            (endpoint, client, client.ask(some))
            for endpoint, client in self._clients.items()
            if self._resting.get(endpoint, 0.0) <= now
        ]
        for endpoint, client, number in asked:
            try:
                listed = client.listed(number, now + PATIENCE_S)
            except TransportError:
                self._give_up(endpoint)
                continue
            self._resting.pop(endpoint, None)
            for file in listed:
                self._where.setdefault(file.name.partition(".")[0], {}).setdefault(file.name, (endpoint, file.size))
        return [
            (name, size)
            for stem in (self._where if stems is None else stems)
            for name, (_, size) in self._where.get(stem, {}).items()
        ]

    def fetch(self, name: str) -> bytes:
        """Fetch a listed file. Raises TransportError."""
        endpoint, size = self._where.get(name.partition(".")[0], {}).pop(name, ("", 0))
        if not endpoint:
            raise TransportError("no machine lends it")
        whole = bytearray(size)
        ranges = [Range(name, at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
        try:
            for index, data, _ in self._clients[endpoint].read(ranges):
                whole[index * CHUNK : index * CHUNK + len(data)] = data
        except NotServed:  # the file was deleted there
            raise
        except TransportError as error:
            self._give_up(endpoint)
            raise TransportError("the machine that has it has not sent it") from error
        return bytes(whole)

    def _client(self, endpoint: str) -> BlobClient:
        return BlobClient(endpoint, self._keys, patience_s=PATIENCE_S)

    def _give_up(self, endpoint: str) -> None:
        """Reconnect to an unresponsive endpoint, and do not ask it for `REST_S` seconds."""
        self._leave(endpoint)
        self._clients[endpoint] = self._client(endpoint)
        self._resting[endpoint] = time.monotonic() + REST_S

    def _leave(self, endpoint: str) -> None:
        """Close an endpoint and forget its files."""
        for stem, files in self._where.items():
            self._where[stem] = {name: place for name, place in files.items() if place[0] != endpoint}
        self._clients.pop(endpoint).close()

    def close(self) -> None:
        """Close all endpoints."""
        self.change(())
