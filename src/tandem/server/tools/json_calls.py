"""JSON formats of tool calls: Hermes and Qwen, Cohere, Llama 3, Mistral, and the generic list for forced calls."""

from __future__ import annotations

import re

from tandem.server.tools.deltas import CallStart, Content
from tandem.server.tools.json_text import json_object, named_calls
from tandem.server.tools.scan import Feed, Reader, Steps, everything, followed, next_visible, passed_on

OPEN, CLOSE = "<tool_call>", "</tool_call>"
ACTION, ACTION_END = "<|START_ACTION|>", "<|END_ACTION|>"
PYTHON = "<|python_tag|>"
CALLS, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_KEYS = ('"name"', '"parameters"', '"arguments"', '"type"', '"function"')
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]([\w-]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_ID = re.compile(r"[a-zA-Z0-9]{9}")  # ids that Mistral's templates accept


def _between(opening: str, closing: str) -> Reader:
    """Return a reader of content and of JSON calls between two tags."""

    def read(feed: Feed) -> Steps[None]:
        index = 0
        while (yield from passed_on(feed, (opening,))):
            index = yield from named_calls(feed, index, opening, closing)

    return read


hermes = _between(OPEN, CLOSE)
cohere = _between(ACTION, ACTION_END)


def generic(feed: Feed) -> Steps[None]:
    """Read the text as a JSON list of calls, else as content."""
    if (yield from next_visible(feed)) == "[":
        yield from named_calls(feed, 0, "")
    yield from everything(feed)


def llama3(feed: Feed) -> Steps[None]:
    """Read calls if the answer begins with one (optionally after `<|python_tag|>`), else content. `;` separates calls."""
    if (yield from next_visible(feed)) == "<":
        yield from followed(feed, PYTHON)
    if (yield from next_visible(feed)) == "{" and (yield from _may_be_call(feed)):
        yield from named_calls(feed, 0, "")
    yield from everything(feed)


def _may_be_call(feed: Feed) -> Steps[bool]:
    """Return whether the object's first key is a key of calls; else the answer is other JSON."""
    while True:
        key = feed.text[1:].lstrip()
        if any(key.startswith(known) for known in _KEYS):
            return True
        if feed.ended or not any(known.startswith(key) for known in _KEYS):
            return False
        yield None


def mistral(feed: Feed) -> Steps[None]:
    """Read content, and calls after `[TOOL_CALLS]`: a JSON list, or (from version 11) `name[ARGS]{...}` each."""
    index = 0
    while (yield from passed_on(feed, (CALLS,))):
        if (yield from next_visible(feed)) == "[":
            index = yield from named_calls(feed, index, CALLS)
        else:
            index = yield from _by_name(feed, index)


def _by_name(feed: Feed, index: int) -> Steps[int]:
    while True:
        if head := _NAME.match(feed.text):
            feed.take(head.end())
            yield CallStart(index, head[1], head[2] if head[2] and _ID.fullmatch(head[2]) else "")
            yield from json_object(feed, index)
            return index + 1
        if feed.ended or "{" in feed.text or CALLS in feed.text:
            yield Content(CALLS)
            return index
        yield None
