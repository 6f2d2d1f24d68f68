"""Pictures in the messages of `LLM.chat`: content parts as in OpenAI's chats, with a data URI or a path."""

from __future__ import annotations

import base64
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tandem.errors import RequestError
from tandem.json_types import JsonMapping
from tandem.text.pictures import refusal

DETAILS = ("auto", "low", "high", "original")


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


def shown(messages: Sequence[JsonMapping], placeholder: str) -> tuple[list[JsonMapping], list[tuple[str, bool]]]:
    """Return the messages as the chat template reads them, and for each picture its data URI and whether a small one is enough.

    `placeholder`: text in place of pictures for templates that read text alone; empty for others. Raises RequestError.
    """
    ours, pictures = list[JsonMapping](), list[tuple[str, bool]]()
    for message in messages:
        if isinstance(message.get("content"), list):
            parts: list[Any] = []
            for part in message["content"]:
                if is_picture(part):
                    given = part.get(part["type"])
                    given = given if isinstance(given, dict) else {"url": given}
                    if given.get("detail", "auto") not in DETAILS:
                        raise refusal(len(pictures) + 1, f"has detail {given['detail']!r:.60}", f"give {' or '.join(DETAILS)}")
                    pictures.append((_data_uri(len(pictures) + 1, given.get("url")), given.get("detail") == "low"))
                parts.append({"type": "image"} if is_picture(part) else part)
            texts = (part.get("text", placeholder) if isinstance(part, dict) else part for part in parts)
            message = {**message, "content": "".join(map(str, texts)) if placeholder else parts}
        ours.append(message)
    return ours, pictures


def _data_uri(number: int, url: Any) -> str:
    """Return the data URI of picture `number`, which is read where `url` is a path. Raises RequestError."""
    try:
        return url if str(url).startswith("data:") else f"data:;base64,{base64.b64encode(Path(url).read_bytes()).decode()}"
    except (OSError, TypeError, ValueError) as error:
        why = "nothing is fetched from URLs" if str(url).lower().startswith(("http:", "https:")) else error
        raise refusal(number, f"cannot be read ({why})", "give the path of a file, or a data URI") from error
