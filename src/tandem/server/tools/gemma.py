"""Gemma: `call:name{key:value,...}` between special tokens, with strings between tokens of their own."""

from __future__ import annotations

import re
from typing import Any

from tandem.server.tools.events import CallArguments, CallStart, Content
from tandem.server.tools.json_text import dumped, loads
from tandem.server.tools.scan import Feed, Steps, held, passed_on

TAGS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
"""Opening and closing token of Gemma 4, and of FunctionGemma."""
QUOTES = ('<|"|>', "<escape>")
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_BARE = re.compile(r"[^,}\]]*")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"(?=\s*[,}\]])', re.DOTALL)
_KEY = re.compile(r"\s*([^:{}\[\],\s]+)\s*:")
DEEPEST = 32


def gemma(feed: Feed) -> Steps[None]:
    """Content, and calls, each read when it is complete."""
    index = 0
    while opening := (yield from passed_on(feed, tuple(TAGS))):
        body, closing = yield from held(feed, (TAGS[opening],))
        call = _CALL.fullmatch(body)
        try:
            value, rest = _value(call[2] if call else "", 0)
            arguments = dumped(value)
        except (ValueError, IndexError):
            call = None
        if call is None or rest.strip():
            yield Content(opening + body + closing)
            continue
        yield CallStart(index, call[1])
        yield CallArguments(index, arguments)
        index += 1


def _value(text: str, depth: int) -> tuple[Any, str]:
    """A value at the start of `text`, and what follows it. Raises ValueError."""
    text = text.lstrip()
    if depth > DEEPEST:
        raise ValueError("nested too deeply")
    for quote in QUOTES:
        if text.startswith(quote):
            string, closing, rest = text[len(quote):].partition(quote)
            if not closing:
                raise ValueError("a string without an end")
            return string, rest
    if quoted := _QUOTED.match(text):
        return loads(quoted[0]), text[quoted.end():]
    if text.startswith("{"):
        return _object(text[1:].lstrip(), depth)
    if text.startswith("["):
        return _list(text[1:].lstrip(), depth)
    bare = _BARE.match(text)
    word = bare[0].strip() if bare else ""
    if not word:
        raise ValueError("no value")
    rest = text[bare.end() if bare else 0:]
    try:
        return loads(word), rest
    except ValueError:
        return word, rest


def _object(text: str, depth: int) -> tuple[dict[str, Any], str]:
    found: dict[str, Any] = {}
    while not text.startswith("}"):
        key = _KEY.match(text)
        if not key:
            raise ValueError("no key")
        found[key[1].strip('"')], text = _value(text[key.end():], depth + 1)
        text = _after(text, "}")
    return found, text[1:]


def _list(text: str, depth: int) -> tuple[list[Any], str]:
    found = []
    while not text.startswith("]"):
        value, text = _value(text, depth + 1)
        found.append(value)
        text = _after(text, "]")
    return found, text[1:]


def _after(text: str, end: str) -> str:
    """What follows a comma, or the `end` that comes next."""
    text = text.lstrip()
    if text.startswith(","):
        return text[1:].lstrip()
    if not text.startswith(end):
        raise ValueError(f"neither a comma nor {end}")
    return text
