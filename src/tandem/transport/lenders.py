"""Parts of pieces that lie on other machines' disks: lent to ranks that hold the keys, of the same gang or of another
replica of the model."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from msgspec import Struct

from tandem.errors import TransportError
from tandem.protocol.blobs import BlobFile, Range
from tandem.protocol.keys import ClusterKeys
from tandem.transport.blobs import CHUNK, BlobClient, BlobServer, NotServed, checksum

PATIENCE_S = 5.0
"""Seconds for a chunk, or for all lists; what has not come by then is computed."""
REST_S = 30.0
"""Seconds for which nobody is asked who has not answered."""
SUFFIX = ".kv"
"""Of the files that hold parts of pieces."""


class Lending(Struct, frozen=True):
    """What a rank needs to lend what it has, and to borrow."""

    keys: ClusterKeys
    host: str
    """Address of its machine to listen at."""


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
                with suppress(OSError):  # one that is deleted just now
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

    def __init__(self, keys: ClusterKeys, endpoints: Iterable[str] = ()) -> None:
        """Connects when first asked for something."""
        self._keys = keys
        self._clients: dict[str, BlobClient | None] = {}
        self._where: dict[str, tuple[str, int]] = {}
        """Of each file: who lends it, and its bytes."""
        self._resting: dict[str, float] = {}
        """Who is not asked, and until when."""
        self.change(endpoints)

    def change(self, endpoints: Iterable[str]) -> None:
        """From now on these lend, and no others."""
        named = set(endpoints)
        for endpoint in self._clients.keys() - named:
            self._drop(endpoint)
            del self._clients[endpoint]
            self._resting.pop(endpoint, None)
        self._where = {name: one for name, one in self._where.items() if one[0] in named}
        self._clients |= dict.fromkeys(named - self._clients.keys())

    def files(self) -> Iterator[tuple[str, int]]:
        """Names and sizes of what is lent now. Those who do not answer have nothing, and are left alone for a while."""
        self._where = {}
        now = time.monotonic()
        asked = [(endpoint, client, client.ask()) for endpoint in self._clients
                 if self._resting.get(endpoint, 0.0) <= now and (client := self._client(endpoint))]
        for endpoint, client, number in asked:
            try:
                listed = client.listed(number, now + PATIENCE_S)
            except TransportError:
                self._give_up(endpoint)
                continue
            self._resting.pop(endpoint, None)
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
        except NotServed:  # it has been deleted there
            raise
        except TransportError as error:
            self._give_up(endpoint)
            raise TransportError("the machine that has it has not sent it") from error
        return bytes(whole)

    def _client(self, endpoint: str) -> BlobClient:
        client = self._clients[endpoint]
        if client is None:
            client = self._clients[endpoint] = BlobClient(endpoint, self._keys, patience_s=PATIENCE_S)
        return client

    def _give_up(self, endpoint: str) -> None:
        """Nobody waits for it once more: what it was to lend is computed."""
        self._drop(endpoint)
        self._where = {name: one for name, one in self._where.items() if one[0] != endpoint}
        self._resting[endpoint] = time.monotonic() + REST_S

    def _drop(self, endpoint: str) -> None:
        """What it still sends is for nobody."""
        client, self._clients[endpoint] = self._clients[endpoint], None
        if client is not None:
            client.close()

    def close(self) -> None:
        """Leave all of them."""
        self.change(())
