"""Remote KV: parts of disk blocks on other machines' disks, for ranks that hold the keys."""

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
"""Timeout in seconds of a chunk, or of all lists; missing blocks are computed."""
REST_S = 30.0
"""Seconds for which a silent endpoint is not asked."""
MOST_LISTED = 50_000
"""Largest number of files in an answer, which is limited in size."""
MOST_STEMS = 5000
"""Most stems of one request; beyond it all files are listed."""
SUFFIX = ".kv"
"""Suffix of files that hold parts of disk blocks."""
PARTS = "parts"
"""Directory beside these files, with an empty file for each label in their names."""


def files_of(directory: Path, stems: Collection[str] | None) -> Iterator[tuple[str, os.stat_result]]:
    """Yield files of disk blocks in a directory: all, or those whose names begin with one of `stems` and a dot, without
    reading the directory. Raises OSError."""
    if stems is None:
        names = os.listdir(directory)
    else:  # there is a file for each label, which names have between stem and suffix, once one of its parts is there
        labels = os.listdir(directory / PARTS) if (directory / PARTS).exists() else []
        names = [f"{stem}.{label}{SUFFIX}" for label in labels for stem in set(stems)]
    for name in filter(_is_name, names):
        with suppress(OSError):  # one that is deleted just now, or not there
            status = os.stat(directory / name, follow_symlinks=False)
            if stat.S_ISREG(status.st_mode):
                yield name, status


class Lending(Struct, frozen=True):
    """Keys and address with which a rank serves its files, and fetches those of others."""

    keys: ClusterKeys
    host: str
    """Address of the rank's machine to listen at."""


class DiskBlockServer(BlobServer):
    """Serves the files that are in a directory at the moment, and nothing else."""

    def __init__(self, directory: Path, lending: Lending) -> None:
        """Listen at a free port. Raises TransportError where there is none."""
        self._directory = directory
        super().__init__((), lending.keys, lending.host)

    def listed(self, stems: Collection[str] | None) -> list[BlobFile]:
        """List the files with these stems, or all. Raises OSError."""
        return [
            BlobFile(name, status.st_size, status.st_mtime_ns, "")
            for name, status in islice(files_of(self._directory, stems), MOST_LISTED)
        ]

    def chunk(self, wanted: Range) -> tuple[bytes, bytes]:
        """Return checksum and bytes of a range. Raises TransportError for one that is not lent, and OSError."""
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
    """True for the name of a disk block's file."""
    return name.isascii() and name.endswith(SUFFIX) and not name.startswith(".") and "/" not in name and "\0" not in name


class RemoteStores:
    """Files on other machines. Used by one thread."""

    def __init__(self, keys: ClusterKeys, endpoints: Iterable[str] = ()) -> None:
        self._keys = keys
        self._clients: dict[str, BlobClient] = {}
        self._where: dict[str, dict[str, tuple[str, int]]] = {}
        """Endpoint and size of each lent file, by stem and name."""
        self._resting: dict[str, float] = {}
        """Endpoints that are not asked, and until when."""
        self.change(endpoints)

    def change(self, endpoints: Iterable[str]) -> None:
        """Replace the endpoints."""
        named = set(endpoints)
        for endpoint in self._clients.keys() - named:
            self._leave(endpoint)
            self._resting.pop(endpoint, None)
        self._clients |= {endpoint: self._client(endpoint) for endpoint in named - self._clients.keys()}

    def look(self, stems: Collection[str] | None = None) -> list[tuple[str, int]]:
        """Ask for the files with these stems, or for all; returns names and sizes. Endpoints that do not answer have
        none."""
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
        """Fetch a file. Raises TransportError."""
        endpoint, size = self._where.get(name.partition(".")[0], {}).pop(name, ("", 0))
        if not endpoint:
            raise TransportError("no machine lends it")
        whole = bytearray(size)
        ranges = [Range(name, at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
        try:
            for index, data, _ in self._clients[endpoint].read(ranges):
                whole[index * CHUNK : index * CHUNK + len(data)] = data
        except NotServed:  # it has been deleted there
            raise
        except TransportError as error:
            self._give_up(endpoint)
            raise TransportError("the machine that has it has not sent it") from error
        return bytes(whole)

    def _client(self, endpoint: str) -> BlobClient:
        return BlobClient(endpoint, self._keys, patience_s=PATIENCE_S)

    def _give_up(self, endpoint: str) -> None:
        """Close an endpoint that did not answer, and do not ask it for `REST_S` seconds."""
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
