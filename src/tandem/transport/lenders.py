"""Parts of pieces that lie on other machines' disks: lent to ranks of the same gang, which hold its keys."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from msgspec import Struct

from tandem.errors import TransportError
from tandem.protocol.blobs import BlobFile, Range
from tandem.protocol.keys import ClusterKeys
from tandem.transport.blobs import CHUNK, BlobClient, BlobServer, checksum

PATIENCE_S = 5.0
"""Seconds for a chunk; one that has not come by then is computed."""
SUFFIX = ".kv"
"""Of the files that hold parts of pieces."""


class Lending(Struct, frozen=True):
    """What a rank needs to lend what it has, and to borrow."""

    keys: ClusterKeys
    host: str
    """Its address for other ranks."""


class PieceServer(BlobServer):
    """Lends the files that are in a directory at the moment, and nothing else."""

    def __init__(self, directory: Path, lending: Lending) -> None:
        """Raises TransportError where no port is free."""
        self._directory = directory
        super().__init__((), lending.keys, lending.host)

    def served(self) -> dict[str, BlobFile]:
        """All of them, by name. Raises OSError."""
        found = {}
        with os.scandir(self._directory) as files:
            for file in files:
                if _is_name(file.name) and file.is_file(follow_symlinks=False):
                    status = file.stat(follow_symlinks=False)
                    found[file.name] = BlobFile(file.name, status.st_size, status.st_mtime_ns, "")
        return found

    def chunk(self, wanted: Range) -> tuple[bytes, bytes]:
        """Checksum and bytes of a range. Raises TransportError for one that is not lent, and OSError."""
        if not _is_name(wanted.name) or not 0 < wanted.length <= CHUNK or wanted.offset < 0:
            raise TransportError(f"{wanted.name!r} is not lent")
        descriptor = os.open(self._directory / wanted.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise TransportError(f"{wanted.name} is no file")
            data = os.pread(descriptor, wanted.length, wanted.offset)
        finally:
            os.close(descriptor)
        if len(data) != wanted.length:
            raise TransportError(f"{wanted.name} has changed")
        return checksum(data), data


def _is_name(name: str) -> bool:
    return name.endswith(SUFFIX) and not name.startswith(".") and "/" not in name and "\0" not in name


class Lenders:
    """Other machines that lend. Used by one thread."""

    def __init__(self, endpoints: Iterable[str], keys: ClusterKeys) -> None:
        """Connects when first asked for something."""
        self._keys = keys
        self._clients: dict[str, BlobClient | None] = dict.fromkeys(endpoints)
        self._where: dict[str, tuple[str, int]] = {}
        """Of each file: who lends it, and its bytes."""

    def files(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of what is lent now. Those who do not answer have nothing."""
        self._where = {}
        for endpoint in self._clients:
            try:
                listed = self._client(endpoint).files()
            except TransportError:
                self._drop(endpoint)
                continue
            for file in listed:
                if file.name not in self._where:
                    self._where[file.name] = endpoint, file.size
                    yield file.name, file.size

    def bring(self, name: str) -> bytes:
        """All of a file. Raises TransportError."""
        endpoint, size = self._where.pop(name, ("", 0))
        if not endpoint:
            raise TransportError("no machine lends it")
        whole = bytearray(size)
        ranges = [Range(name, at, min(CHUNK, size - at)) for at in range(0, size, CHUNK)]
        try:
            for index, data, _ in self._client(endpoint).read(ranges):
                whole[index * CHUNK:index * CHUNK + len(data)] = data
        except TransportError as error:
            self._drop(endpoint)
            raise TransportError("the machine that has it has not sent it") from error
        return bytes(whole)

    def _client(self, endpoint: str) -> BlobClient:
        client = self._clients[endpoint]
        if client is None:
            client = self._clients[endpoint] = BlobClient(endpoint, self._keys, patience_s=PATIENCE_S)
        return client

    def _drop(self, endpoint: str) -> None:
        """What it still sends is for nobody."""
        client, self._clients[endpoint] = self._clients[endpoint], None
        if client is not None:
            client.close()

    def close(self) -> None:
        """Leave all of them."""
        for endpoint in self._clients:
            self._drop(endpoint)
