"""Files of the engine's machine for its ranks: byte ranges over CURVE-secured TCP, read-only, each with a checksum.

The server answers requests one by one and holds nothing between them; a client keeps a few requests under way. So
memory on both sides is a few chunks, whatever the size of the files.
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
"""Number of requests that a client has under way."""
ATTEMPTS = 4
"""Number of times that a chunk is asked for when it arrives damaged."""
PATIENCE_S = 60.0
"""Seconds without any answer before the server counts as gone."""
MAX_REQUEST = 256 * 1024
MAX_ANSWER = 2 * CHUNK
SAMPLES, SAMPLE = 64, 4096
"""Blocks of a file, and bytes in each, by which files of the same size and time are told apart."""


def checksum(data: bytes | memoryview) -> bytes:
    """BLAKE2b of `data`, 16 bytes."""
    return hashlib.blake2b(data, digest_size=16).digest()


class BlobServer(MemberSocket):
    """Serves the given files, and nothing else, from a thread of its own until `close`."""

    def __init__(self, paths: Iterable[Path], keys: ClusterKeys, host: str = "127.0.0.1") -> None:
        """Names are those of the files, without their directories, and must differ."""
        self._paths = {path.name: path for path in paths}
        super().__init__(zmq.ROUTER, keys, MAX_REQUEST)
        # A peer that asks without reading loses answers; the memory stays bounded. One that has given a call up has two
        # windows under way, and what it has read counts in steps of half the mark.
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

    def _answer(self, frames: Sequence[bytes]) -> list[bytes] | None:
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
        """List the files for a `ListFiles`."""
        return [file for name, file in self.served.items() if stems is None or name.partition(".")[0] in stems]

    @cached_property
    def served(self) -> dict[str, messages.BlobFile]:
        """Served files by name, as they were at the first request."""
        return {name: _describe(path) for name, path in self._paths.items()}

    def chunk(self, wanted: messages.Range) -> tuple[bytes, bytes]:
        """Return checksum and bytes of a range. Raises TransportError for one that is not served, and OSError."""
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
            self._context.term()  # the thread, which waits for a question, closes the socket
            self._thread.join()


def _describe(path: Path) -> messages.BlobFile:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
        for i in range(SAMPLES):
            digest.update(os.pread(file.fileno(), SAMPLE, max(status.st_size - SAMPLE, 0) * i // (SAMPLES - 1)))
    return messages.BlobFile(path.name, status.st_size, status.st_mtime_ns, digest.hexdigest())


class NotServed(TransportError):
    """The server does not have what it was asked for."""


class BlobClient(MemberSocket):
    """Used by one thread."""

    def __init__(self, endpoint: str, keys: ClusterKeys, *, patience_s: float = PATIENCE_S) -> None:
        """Connect; `patience_s` is how long to wait for an answer."""
        self._patience = patience_s
        super().__init__(zmq.DEALER, keys, MAX_ANSWER)
        self._connect(endpoint)
        self._decoder = Decoder[messages.BlobAnswer](messages.BlobAnswer)
        self._number = 0

    def files(self) -> list[messages.BlobFile]:
        """List the served files. Raises TransportError without an answer."""
        return self.listed(self.ask())

    def ask(self, stems: Collection[str] | None = None) -> int:
        """Send a `ListFiles`; return its number, for `listed`."""
        return self._ask(messages.ListFiles, None if stems is None else list(stems))

    def listed(self, number: int, until: float | None = None) -> list[messages.BlobFile]:
        """Wait for the answer, until a time of the monotonic clock. Raises TransportError when there is none."""
        answer, _ = self._receive([number], time.monotonic() + self._patience if until is None else until)
        if isinstance(answer, messages.Refusal):
            raise TransportError(f"the engine's machine cannot list its files: {answer.message}")
        if not isinstance(answer, messages.FileList):
            raise TransportError(f"the engine's machine answers {type(answer).__name__} for a list of files")
        return answer.files

    def read(self, ranges: Sequence[messages.Range]) -> Iterator[tuple[int, memoryview, bytes]]:
        """Yield each range once, in any order, as (index in `ranges`, bytes, checksum); ask again for a damaged one.

        Ranges are of at most `CHUNK` bytes. Raises TransportError when one is refused, stays damaged, or none comes.
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
        """Send a question with a number of its own, and return the number."""
        self._number += 1
        self.socket.send(encode(kind(self._number, wanted)))
        return self._number

    def _receive(self, numbers: Container[int], until: float) -> tuple[messages.BlobAnswer, memoryview]:
        """Return the next answer to one of these questions; skip others, as of a call that was given up."""
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
        raise TransportError(f"the engine's machine has sent no weights for {self._patience:.0f} s; is it up?")
