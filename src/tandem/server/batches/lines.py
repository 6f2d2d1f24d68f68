"""Lines of OpenAI's batch files: one request, and one answer. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw, Struct


class Line(Struct, frozen=True):
    """One request of a file."""

    custom_id: str
    url: str
    body: bytes
    """A JSON object."""


class _Any(Struct):
    custom_id: Any = None
    method: Any = "POST"
    url: Any = None
    body: Raw = Raw(b"null")


class _Body(Struct):
    stream: Any = None
    background: Any = None


def parse_line(raw: bytes) -> Line:
    """Raises ValueError, which says what is wrong in plain words."""
    try:
        line = msgspec.json.decode(raw, type=_Any)
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


class _Id(Struct):
    id: Any = ""


class _CustomId(Struct):
    custom_id: str


def custom_id_of(line: bytes) -> str:
    """Whose answer a line is."""
    return msgspec.json.decode(line, type=_CustomId).custom_id


def sealed(line: bytes) -> bytes:
    """A line of results as it is kept while the batch runs, behind its checksum."""
    return hashlib.blake2b(line, digest_size=8).hexdigest().encode() + b" " + line


def unsealed(kept: bytes) -> bytes | None:
    """The line, without its checksum; None for one that is torn, or that the disk has changed."""
    line = kept.partition(b" ")[2]
    return line if line.endswith(b"\n") and sealed(line) == kept else None


def answer_line(line_id: str, custom_id: str, status: int, body: bytes) -> bytes:
    """The line that says what a request got: HTTP status and JSON body."""
    try:
        request_id = msgspec.json.decode(body, type=_Id).id
    except msgspec.DecodeError:
        request_id = ""
    response = {"status_code": status, "request_id": request_id if isinstance(request_id, str) else "",
                "body": Raw(body)}
    return _line({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def failure_line(line_id: str, custom_id: str, code: str, message: str) -> bytes:
    """The line of a request that was not run."""
    error = {"code": code, "message": message}
    return _line({"id": line_id, "custom_id": custom_id, "response": None, "error": error})


def _line(data: dict[str, Any]) -> bytes:
    return msgspec.json.encode(data).replace(b"\n", b" ") + b"\n"
