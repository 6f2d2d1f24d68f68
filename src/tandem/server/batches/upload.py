"""A file on its way in: multipart/form-data, written to disk as it comes."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from tandem.errors import RequestError, TooLargeError
from tandem.server.batches.files import KEEP_S, File, Files, on_disk
from tandem.server.context import new_id
from tandem.server.failures import ClientGone, refused

IDLE_S = 60.0
"""Seconds that may pass between two pieces of a body."""
AT_ONCE = 2**20
"""Bytes that are written together."""
AROUND = 2**16
"""Bytes that may come before, between and after the parts of a form, with all parts but the file."""
MOST_PARTS, LONGEST_FIELD, LONGEST_HEADERS, LONGEST_NAME = 16, 1024, 8192, 255
SHORTEST_S, LONGEST_S = 3600, 30 * 86400
"""Bounds of `expires_after`, as OpenAI has them."""


class UploadForm:
    """Reads a form: small fields are kept, the bytes of `file` gather in `pending` until they are taken."""

    def __init__(self, boundary: bytes) -> None:
        from python_multipart.multipart import MultipartParser

        self.fields: dict[str, str] = {}
        self.pending = bytearray()
        self.filename: str | None = None
        self.whole = False
        self._parts = 0
        self._name = ""
        self._header = b""
        self._headers: dict[str, bytes] = {}
        self._value = bytearray()
        names = ("on_part_begin", "on_part_data", "on_part_end", "on_header_field", "on_header_value", "on_header_end",
                 "on_headers_finished", "on_end")
        callbacks: Any = {name: getattr(self, name) for name in names}
        self._parser = MultipartParser(boundary, callbacks)

    def feed(self, data: bytes) -> None:
        """More of the body. Raises RequestError."""
        from python_multipart.exceptions import ParseError

        try:
            self._parser.write(data)
        except ParseError as error:
            raise _malformed(str(error)) from None

    def on_part_begin(self) -> None:
        """A part starts."""
        self._parts += 1
        if self._parts > MOST_PARTS:
            raise _malformed(f"more than {MOST_PARTS} parts")
        self._name, self._header, self._headers, self._value = "", b"", {}, bytearray()

    def on_header_field(self, data: bytes, start: int, end: int) -> None:
        """A piece of a header's name."""
        self._header += data[start:end]
        self._check_headers()

    def on_header_value(self, data: bytes, start: int, end: int) -> None:
        """A piece of its value."""
        self._value += data[start:end]
        self._check_headers()

    def _check_headers(self) -> None:
        if len(self._header) + len(self._value) + sum(map(len, self._headers.values())) > LONGEST_HEADERS:
            raise _malformed("headers of a part that are too long")

    def on_header_end(self) -> None:
        """A header is whole."""
        self._headers[self._header.decode("latin-1").lower()] = bytes(self._value)
        self._header, self._value = b"", bytearray()

    def on_headers_finished(self) -> None:
        """The part's content follows."""
        from python_multipart.multipart import parse_options_header

        _, options = parse_options_header(self._headers.get("content-disposition", b""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name == "file":
            if self.filename is not None:
                raise _malformed("more than one 'file'")
            self.filename = options.get(b"filename", b"").decode("utf-8", "replace")[:LONGEST_NAME] or "file"

    def on_part_data(self, data: bytes, start: int, end: int) -> None:
        """A piece of the content."""
        if self._name == "file":
            self.pending += data[start:end]
        else:
            self._value += data[start:end]
            if len(self._value) > LONGEST_FIELD:
                raise RequestError(f"The field '{self._name[:40]}' is longer than {LONGEST_FIELD} bytes.",
                                   param=self._name[:40], code="invalid_value")

    def on_part_end(self) -> None:
        """The part is whole."""
        if self._name != "file":
            self.fields[self._name] = self._value.decode("utf-8", "replace")

    def on_end(self) -> None:
        """The form is whole."""
        self.whole = True


def _malformed(why: str) -> RequestError:
    return RequestError(f"The body is not a well-formed multipart/form-data: {why[:200]}.", code="invalid_form")


async def take(http: Request, files: Files, owner: str, limit: int) -> File:
    """Receive the form of a request, and keep its file, of at most `limit` bytes. Raises RequestError."""
    form = UploadForm(_boundary(http))
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit + AROUND:
        raise _too_large(limit)
    loop = asyncio.get_running_loop()
    path, out = files.begin(owner)
    came = size = 0
    try:
        chunks = http.stream()
        while True:
            try:
                async with asyncio.timeout(IDLE_S):
                    chunk = await anext(chunks, None)
            except TimeoutError:
                raise refused(408, f"Nothing of the body arrived within {IDLE_S:.0f}s.",
                              code="request_timeout") from None
            if chunk:
                came += len(chunk)
                form.feed(chunk)
            if size + len(form.pending) > limit or came > limit + AROUND:
                raise _too_large(limit)
            if len(form.pending) >= AT_ONCE or chunk is None:
                piece, form.pending = form.pending, bytearray()
                size += len(piece)
                files.grow(owner, path, size)
                with on_disk():
                    await loop.run_in_executor(files.thread, out.write, piece)
            if chunk is None:
                break
        file = _described(form, owner, size)
        with on_disk():
            await loop.run_in_executor(files.thread, _finish, files, file, path, out)
        return file
    except ClientDisconnect:
        raise ClientGone("The client left.") from None
    finally:
        with contextlib.suppress(OSError):  # what a full disk did not take is tried once more
            out.close()
        files.end(path)


def _finish(files: Files, file: File, path: Any, out: Any) -> None:
    out.flush()
    try:
        files.add(file, path)
    except OSError:
        files.path(file.id).unlink(missing_ok=True)
        raise


def _boundary(http: Request) -> bytes:
    from python_multipart.multipart import parse_options_header

    kind, options = parse_options_header(http.headers.get("content-type", ""))
    boundary: bytes = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 0 < len(boundary) <= 200:
        raise RequestError("A file is sent as multipart/form-data, with the fields 'purpose' and 'file'.", param="file",
                           code="invalid_form")
    return boundary


def _too_large(limit: int) -> TooLargeError:
    return TooLargeError(f"The file is larger than the limit of {limit} bytes (--max-file-mb).", param="file")


def _described(form: UploadForm, owner: str, size: int) -> File:
    """What the form says of its file. Raises RequestError."""
    if not form.whole:
        raise _malformed("it ends too early")
    purpose, strangers = form.fields.get("purpose"), form.fields.keys() - {
        "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    if strangers:
        name = min(strangers)[:40]
        raise RequestError(f"Unknown parameter: '{name}'.", param=name, code="unknown_parameter")
    if purpose is None or form.filename is None:
        missing = "purpose" if purpose is None else "file"
        raise RequestError(f"Missing required parameter: '{missing}'.", param=missing,
                           code="missing_required_parameter")
    if purpose != "batch":
        raise RequestError(f"Invalid 'purpose': '{purpose[:40]}'; only files for 'batch' have a use here.",
                           param="purpose", code="invalid_value")
    if not size:
        raise RequestError("'file' is empty.", param="file", code="invalid_value")
    now = time.time()
    return File(id=new_id("file"), owner=owner, filename=form.filename, purpose=purpose, bytes=size, created_at=now,
                expires_at=now + _keep_s(form.fields))


def _keep_s(fields: dict[str, str]) -> float:
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return KEEP_S
    if anchor != "created_at":
        raise RequestError("Invalid 'expires_after[anchor]': expected 'created_at'.", param="expires_after[anchor]",
                           code="invalid_value")
    if not (seconds and seconds.isascii() and seconds.isdigit() and SHORTEST_S <= int(seconds[:20]) <= LONGEST_S):
        raise RequestError(f"Invalid 'expires_after[seconds]': expected {SHORTEST_S} to {LONGEST_S}.",
                           param="expires_after[seconds]", code="invalid_value")
    return float(seconds)
