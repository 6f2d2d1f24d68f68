"""Messages that transfer files between machines (transport/blobs.py)."""

from __future__ import annotations

from msgspec import Struct


class Range(Struct, frozen=True, array_like=True):
    """Byte range of a file: `length` bytes from `offset` on."""

    name: str
    offset: int
    length: int


class BlobFile(Struct, frozen=True):
    """Entry of `FileList`: one file that the peer serves."""

    name: str
    size: int
    mtime_ns: int
    sample: str
    """Checksum of sampled blocks of the file, to detect changed content cheaply."""


class ListFiles(Struct, frozen=True, tag=True):
    """Ask for `FileList`."""

    number: int
    stems: list[str] | None = None
    """Prefixes: list only files named `STEM.*`. None lists all files."""


class ReadRange(Struct, frozen=True, tag=True):
    """Ask for `Chunk`."""

    number: int
    range: Range


class FileList(Struct, frozen=True, tag=True):
    """Answer to `ListFiles`: the files that the peer serves."""

    number: int
    files: list[BlobFile]


class Chunk(Struct, frozen=True, tag=True):
    """Header of a chunk. The chunk's bytes follow in a separate ZeroMQ frame."""

    number: int
    digest: bytes
    """Checksum of the bytes (`transport.blobs.checksum`)."""


class Refusal(Struct, frozen=True, tag=True):
    """Answer to a request that cannot be served, with the reason."""

    number: int
    message: str


BlobRequest = ListFiles | ReadRange
BlobAnswer = FileList | Chunk | Refusal
