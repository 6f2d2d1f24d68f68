"""File server of the engine's machine for its ranks: byte ranges over CURVE-secured TCP, read-only, each with a checksum.

The server answers requests one by one and keeps no state between them. A client keeps `WINDOW` requests in flight, so memory
on both sides is a few chunks, whatever the size of the files.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import zmq

from tandem.crash_guard import start_thread
from tandem.errors import TransportError
from tandem.log import Seldom
from tandem.protocol import blob_messages as messages
from tandem.protocol.codec import Decoder, encode
from tandem.protocol.keys import ClusterKeys
from tandem.transport.security import MemberSocket

Wanted = TypeVar("Wanted")

log = logging.getLogger(__name__)
seldom = Seldom(log)

CHUNK = 4 * 1024 * 1024
"""Largest answer in bytes."""
WINDOW = 4
"""Number of requests that a client keeps in flight."""
ATTEMPTS = 4
"""Number of times that a chunk is requested before a wrong checksum raises an error."""
PATIENCE_S = 60.0
"""Seconds without an answer after which the server counts as unreachable."""
MAX_REQUEST = 256 * 1024
MAX_ANSWER = 2 * CHUNK
SAMPLES, SAMPLE = 64, 4096
"""Number of sampled blocks of a file, and bytes in each. Their digest distinguishes files of equal size and time."""


def checksum(data: bytes | memoryview) -> bytes:
    """Return the 16-byte BLAKE2b digest of `data`."""
    return hashlib.blake2b(data, digest_size=16).digest()


class BlobServer(MemberSocket):
    """Server of a fixed set of files; runs in its own thread until `close`."""

    def __init__(self, paths: Iterable[Path], keys: ClusterKeys, host: str = "127.0.0.1") -> None:
        """Listen on a free port of `host` and start the thread. Files are served by their names without directories, which
        must differ."""
        self._paths = {path.name: path for path in paths}
        self.data: dict[str, memoryview] = {}
        """Served bytes by name, which are not listed."""
        super().__init__(zmq.ROUTER, keys, MAX_REQUEST)
        # The mark bounds memory: answers to a peer that requests without reading are dropped. A client that abandoned a call
        # has two windows in flight, and ZeroMQ counts what it has read in steps of half the mark.
        self.socket.sndhwm = 4 * WINDOW
        self._listen(host)
        self._decoder = Decoder[messages.BlobRequest](messages.BlobRequest)
        self._thread = start_thread(self._run, name="blobs")

    def _run(self) -> None:
        with suppress(zmq.ContextTerminated), self.socket:
            while True:
                identity, *frames = self.socket.recv_multipart()
                if (answer := self._answer(frames)) is not None:
                    self.socket.send_multipart([identity, *answer], copy=False)

    def _answer(self, frames: Sequence[bytes]) -> list[bytes | memoryview] | None:
        try:
            request = self._decoder.decode(frames[0] if len(frames) == 1 else b"")
        except TransportError as error:
            seldom.warning("a request for a file cannot be read: %s; it is dropped; is the rank of this version?", error)
            return None
        try:
            if isinstance(request, messages.ListFiles):
                return [encode(messages.FileList(request.number, self.listed(request.stems)))]
            digest, data = self.chunk(request.range)
            return [encode(messages.Chunk(request.number, digest)), data]
        except TransportError as error:
            return [encode(messages.Refusal(request.number, error.message))]
        except OSError as error:
            return [encode(messages.Refusal(request.number, f"cannot be read: {error.strerror or error}"))]

    def listed(self, stems: Collection[str] | None) -> list[messages.BlobFile]:
        """Return the files whose name up to the first dot is in `stems`; None selects all files."""
        return [file for name, file in self.served.items() if stems is None or name.partition(".")[0] in stems]

    @cached_property
    def served(self) -> dict[str, messages.BlobFile]:
        """Served files by name, with size, time and digest as of the first request."""
        return {name: _describe(path) for name, path in self._paths.items()}

    def chunk(self, wanted: messages.Range) -> tuple[bytes, bytes | memoryview]:
        """Return the checksum and bytes of a range. Raises TransportError for a range that is not served or a changed
        file, OSError when reading fails."""
        if part := self.data.get(wanted.name, memoryview(b""))[wanted.offset : wanted.offset + min(wanted.length, CHUNK)]:
            return checksum(part), part
        file = self.served.get(wanted.name)
        if file is None:
            raise TransportError(f"{wanted.name!r} is not one of the model's files")
        if not 0 < wanted.length <= CHUNK or wanted.offset < 0 or wanted.offset + wanted.length > file.size:
            raise TransportError(
                f"{wanted.name}: {wanted.length} bytes from {wanted.offset} on are not served: the "
                f"file has {file.size}, an answer at most {CHUNK}"
            )
        with self._paths[wanted.name].open("rb", buffering=0) as opened:
            status = os.fstat(opened.fileno())
            data = os.pread(opened.fileno(), wanted.length, wanted.offset)
        if (status.st_size, status.st_mtime_ns) != (file.size, file.mtime_ns) or len(data) != wanted.length:
            raise TransportError(f"{wanted.name}: has changed since the ranks were started")
        return checksum(data), data

    def close(self) -> None:
        """End the thread and close the socket. Idempotent."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None
            self._context.term()  # ends the thread's wait for a request; the thread closes the socket
            self._thread.join()


def _describe(path: Path) -> messages.BlobFile:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        for i in range(SAMPLES):
            digest.update(os.pread(file.fileno(), SAMPLE, max(status.st_size - SAMPLE, 0) * i // (SAMPLES - 1)))
    return messages.BlobFile(path.name, status.st_size, status.st_mtime_ns, digest.hexdigest())


class NotServed(TransportError):
    """The server refuses the requested file or range."""


class BlobClient(MemberSocket):
    """Client of a `BlobServer`. Used by one thread."""

    def __init__(self, endpoint: str, keys: ClusterKeys, *, patience_s: float = PATIENCE_S) -> None:
        """Connect without blocking; each wait for an answer lasts at most `patience_s` seconds."""
        self._patience = patience_s
        super().__init__(zmq.DEALER, keys, MAX_ANSWER)
        self._connect(endpoint)
        self._decoder = Decoder[messages.BlobAnswer](messages.BlobAnswer)
        self._number = 0

    def files(self) -> list[messages.BlobFile]:
        """Return all served files. Raises TransportError when no valid answer arrives."""
        return self.listed(self.ask())

    def ask(self, stems: Collection[str] | None = None) -> int:
        """Send a `ListFiles` for these stems (None: all files). Return the request number to pass to `listed`."""
        return self._ask(messages.ListFiles, None if stems is None else list(stems))

    def listed(self, number: int, until: float | None = None) -> list[messages.BlobFile]:
        """Wait for the answer to `ask`, at most until `until` (`time.monotonic()` seconds; None: `patience_s` from now).
        Raises TransportError when no valid answer arrives."""
        answer, _ = self._receive([number], time.monotonic() + self._patience if until is None else until)
        if isinstance(answer, messages.Refusal):
            raise TransportError(f"the engine's machine cannot list its files: {answer.message}")
        if not isinstance(answer, messages.FileList):
            raise TransportError(f"the engine's machine answers {type(answer).__name__} for a list of files")
        return answer.files

    def read(self, ranges: Sequence[messages.Range]) -> Iterator[tuple[int, memoryview, bytes]]:
        """Yield each range once, in any order, as (index in `ranges`, bytes, checksum); request damaged ones again.

        A range has at most `CHUNK` bytes. Raises NotServed when one is refused, TransportError when one stays damaged or
        does not arrive.
        """
        waiting = deque((index, 1) for index in range(len(ranges)))
        pending: dict[int, tuple[int, int]] = {}
        until = time.monotonic() + self._patience
        while waiting or pending:
            while waiting and len(pending) < WINDOW:
                index, attempt = waiting.popleft()
                pending[self._ask(messages.ReadRange, ranges[index])] = (index, attempt)
            answer, data = self._receive(pending, until)
            index, attempt = pending.pop(answer.number)
            wanted = ranges[index]
            if isinstance(answer, messages.Refusal):
                raise NotServed(f"the engine's machine refuses {wanted.name}: {answer.message}")
            if not isinstance(answer, messages.Chunk):
                raise TransportError(f"the engine's machine answers {type(answer).__name__} for {wanted.name}")
            if len(data) == wanted.length and checksum(data) == answer.digest:
                yield index, data, answer.digest
                until = time.monotonic() + self._patience
                continue
            where = f"{wanted.name}: {wanted.length} bytes from {wanted.offset} on"
            if attempt >= ATTEMPTS:
                raise TransportError(
                    f"{where} arrived damaged {attempt} times (wrong checksum); check the memory and network of both machines"
                )
            log.warning("%s arrived damaged; asking again", where)
            waiting.appendleft((index, attempt + 1))

    def _ask(self, kind: Callable[[int, Wanted], messages.BlobRequest], wanted: Wanted) -> int:
        """Send a request under a new number and return that number."""
        self._number += 1
        self.socket.send(encode(kind(self._number, wanted)))
        return self._number

    def _receive(self, numbers: Container[int], until: float) -> tuple[messages.BlobAnswer, memoryview]:
        """Return the next answer to one of the requests `numbers`, with its data; skip answers to abandoned calls. Raises
        TransportError after `until` (`time.monotonic()` seconds)."""
        waited = False
        while not waited and self.socket.poll(max(int((until - time.monotonic()) * 1000) + 1, 0)):
            frames = self.socket.recv_multipart(copy=False)
            try:
                answer = self._decoder.decode(frames[0].buffer)
            except TransportError as error:
                raise TransportError(f"an answer of the engine's machine cannot be read: {error}") from None
            if answer.number in numbers:
                return answer, frames[1].buffer if len(frames) == 2 else memoryview(b"")
            waited = time.monotonic() > until
        raise TransportError(f"the engine's machine has sent nothing for {self._patience:.0f} s; is it up?")
