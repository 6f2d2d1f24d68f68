"""Pictures in the messages of `LLM.chat`: content parts as in OpenAI's chats, with a data URI or a path."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, get_args

from tandem.errors import RequestError
from tandem.json_types import JsonMapping
from tandem.protocol.pictures import Detail
from tandem.text.pictures import refusal


def is_picture(part: object) -> bool:
    """Return whether a content part is a picture."""
    return isinstance(part, dict) and part.get("type") in ("image_url", "image")


def check_kinds(messages: Sequence[JsonMapping], words: Collection[str]) -> None:
    """Raise RequestError for a content part that would be left out. `words`: strings that the chat template compares with."""
    for number, message in enumerate(messages):
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in ("text", "image_url", "image") and (kind in ("audio", "video") or str(kind) not in words):
                why = f"messages[{number}]: content parts of type {kind!r} are not taken; give 'text', 'image_url' or 'image'"
                raise RequestError(why, param="messages")


def picture_of(number: int, part: JsonMapping) -> tuple[str, bool]:
    """Return the data URI of the picture `number`, which is read where its content part has a path, and whether a small one is
    enough. Raises RequestError."""
    given = part.get(part["type"])
    given = given if isinstance(given, dict) else {"url": given}
    url: Any = given.get("url")
    if (detail := given.get("detail") or "auto") not in get_args(Detail):
        raise refusal(number, f"has detail {detail!r:.60}", f"give {' or '.join(get_args(Detail))}")
    try:
        uri = url if str(url).startswith("data:") else f"data:;base64,{base64.b64encode(Path(url).read_bytes()).decode()}"
    except (OSError, TypeError, ValueError) as error:
        why = "nothing is fetched from URLs" if str(url).lower().startswith(("http:", "https:")) else error
        raise refusal(number, f"cannot be read ({why})", "give the path of a file, or a data URI") from error
    return uri, detail == "low"


def shown(message: JsonMapping, placeholder: str) -> JsonMapping:
    """Return a message as the chat template reads it.

    `placeholder`: text in place of pictures for templates that read text alone; empty for others.
    """
    if not isinstance(message.get("content"), list):
        return message
    parts = [{"type": "image"} if is_picture(part) else part for part in message["content"]]
    texts = (part.get("text", placeholder) if isinstance(part, dict) else part for part in parts)
    return {**message, "content": "".join(map(str, texts)) if placeholder else parts}
