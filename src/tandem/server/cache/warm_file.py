"""Read files with prompts to warm: text, a chat request, or several requests or messages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from tandem.config.settings import Settings
from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.system.files import read_text

Role = Literal["system", "user", "none"]
"""Use of a text: as system message, as beginning of the first user message, or ("none") as prompt without a template."""
Body = JsonObject
MOST = 256 << 20
"""Most bytes of a file."""


def read_warm_file(path: Path, role: Role = "system", *, flag: str = "FILE") -> list[Body]:
    """Return the bodies for POST /v1/cache/warm that a file describes.

    `.json`: a request or its messages; `.jsonl`: one of these, or one message, per line; otherwise text. Raises UsageError
    whose message begins with `flag`.
    """
    try:
        text = read_text(path, MOST)
    except UnicodeDecodeError as error:
        raise UsageError(f"{flag} {path}: is not text in UTF-8 (byte {error.start})", param="warmup_prompts") from None
    except OSError as error:
        raise UsageError(f"{flag} {path}: cannot be read: {error.strerror or error}", param="warmup_prompts") from None
    kind = path.suffix.lower()
    if not text.strip():
        raise UsageError(f"{flag} {path}: has no text in it", param="warmup_prompts")
    try:
        if kind == ".jsonl":
            return _lines(text)
        return [_body(_json(text))] if kind == ".json" else [text_body(text, role)]
    except ValueError as error:
        raise UsageError(f"{flag} {path}: {error}", param="warmup_prompts") from None


def warm_bodies(settings: Settings) -> list[Body]:
    """Read the files of `--warmup-prompts`. Raises UsageError."""
    return [
        body
        for name in settings.server.warmup_prompts
        for body in read_warm_file(Path(name).expanduser(), flag="--warmup-prompts")
    ]


def text_body(text: str, role: Role) -> Body:
    """Return a text as a body for POST /v1/cache/warm."""
    if role == "none":
        return {"prompt": text}
    return {"messages": [{"role": role, "content": text}], "unfinished": role == "user"}


def _lines(text: str) -> list[Body]:
    """Return the bodies in JSON lines. Raises ValueError naming the line."""
    found: list[object] = []
    bodies: list[Body] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            one = _json(line)
            found.append(one)
            if not _is_message(one):
                bodies.append(_body(one))
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    messages = [one for one in found if _is_message(one)]
    if messages and bodies:
        raise ValueError("some lines are messages and some are requests; give one kind")
    return [{"messages": messages}] if messages else bodies


def _json(text: str) -> object:
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("the JSON is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"is not valid JSON: {error}") from None


def _is_message(data: object) -> bool:
    return isinstance(data, dict) and "role" in data and "messages" not in data


def _body(data: object) -> Body:
    """Return the body for a request, a line of a batch file, or messages. Raises ValueError."""
    if isinstance(data, dict) and isinstance(data.get("body"), dict):
        data = data["body"]
    if isinstance(data, list) and data and all(_is_message(one) for one in data):
        return {"messages": data}
    if isinstance(data, dict) and ("messages" in data or "prompt" in data):
        return data
    if _is_message(data):
        return {"messages": [data]}
    raise ValueError("must be a chat request with 'messages', a request with 'prompt', or a list of messages")
