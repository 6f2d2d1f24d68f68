"""Parse and write lines of OpenAI's batch files: requests and answers. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Raw, Struct

Json = dict[str, object]


class Line(Struct, frozen=True):
    """One request of a batch file."""

    custom_id: str
    url: str
    body: bytes
    """Request body, a JSON object."""


class _Request(Struct):
    custom_id: object = None
    method: object = "POST"
    url: object = None
    body: Raw = Raw(b"null")


class _Body(Struct):
    stream: object = None
    background: object = None


def parse_line(raw: bytes) -> Line:
    """Parse a line of an input file. Raises ValueError with a message for the client."""
    try:
        line = msgspec.json.decode(raw, type=_Request)
    except msgspec.ValidationError:
        raise ValueError("a request is a JSON object") from None
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not valid JSON: {error}") from None
    if not isinstance(line.custom_id, str) or not line.custom_id or len(line.custom_id) > 512:
        raise ValueError("'custom_id' must be a text of 1 to 512 characters")
    if line.method != "POST":
        raise ValueError("'method' must be POST")
    url = line.url
    if not isinstance(url, str) or not url.startswith("/v1/") or not (url.isascii() and url.isprintable()):
        raise ValueError("'url' must be a path such as /v1/chat/completions")
    if " " in url:
        raise ValueError("'url' must be without spaces")
    try:
        body = msgspec.json.decode(line.body, type=_Body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        raise ValueError("'body' must be a JSON object") from None
    for name in ("stream", "background"):
        if getattr(body, name):
            raise ValueError(f"'{name}' has no place in a batch")
    return Line(line.custom_id, url, bytes(line.body))


def parse_lines(raws: Iterable[bytes], most: float = math.inf, longest: float = math.inf
                ) -> Iterator[tuple[int, Line | ValueError]]:  # fmt: skip
    """Yield number (from 1) and request, or error, of each line that is not blank.

    `most`: most requests, and most blank lines; `longest`: most bytes of a line.
    """
    custom_ids: set[str] = set()
    count = 0
    for number, raw in enumerate(raws, 1):
        blank = not raw.strip()
        count += not blank
        if max(count, number - count) > most:
            yield number, ValueError(f"a file may hold {most} requests, and as many blank lines")
            return
        if blank:
            continue
        try:
            if len(raw) > longest:
                raise ValueError(f"longer than {longest} bytes (--max-body-mb)")
            line = parse_line(raw)
            if line.custom_id in custom_ids:
                raise ValueError(f"custom_id '{line.custom_id[:100]}' is there twice")
            custom_ids.add(line.custom_id)
            yield number, line
        except ValueError as error:
            yield number, error


class _Identified(Struct):
    id: object = ""


def line_id(batch_id: str, custom_id: str) -> str:
    """Return the deterministic id of a batch line's answer."""
    text = f"{batch_id}\n{custom_id}".encode("utf-8", "surrogatepass")
    return f"batch_req_{hashlib.blake2b(text, digest_size=16).hexdigest()}"


def answer_line(name: str, custom_id: str, status: int, body: bytes) -> bytes:
    """Return the output line of an answered request: HTTP status and JSON body. `name` is its `line_id`."""
    try:
        request_id = msgspec.json.decode(body, type=_Identified).id
    except msgspec.DecodeError:
        request_id = ""
    response = {"status_code": status, "request_id": request_id if isinstance(request_id, str) else "", "body": Raw(body)}
    return _line({"id": name, "custom_id": custom_id, "response": response, "error": None})


def failure_line(name: str, custom_id: str, code: str, message: str) -> bytes:
    """Return the error line of a request that did not run. `name` is its `line_id`."""
    error = {"code": code, "message": message}
    return _line({"id": name, "custom_id": custom_id, "response": None, "error": error})


def _line(data: Json) -> bytes:
    return msgspec.json.encode(data).replace(b"\n", b" ") + b"\n"
