"""Mistral: `[TOOL_CALLS]` before a JSON list of calls, or (from version 11) before each `name[ARGS]{...}`."""

from __future__ import annotations

import re

from tandem.server.tools.events import CallStart, Content
from tandem.server.tools.scan import Feed, Steps, followed, json_object, named_call, next_visible, passed_on

OPEN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"([\w.-]+)\s*(?:\[CALL_ID\]([\w-]*)\s*)?(?:\[ARGS\]\s*)?(?=\{)")
_ID = re.compile(r"[a-zA-Z0-9]{9}")  # what Mistral's templates take back


def mistral(feed: Feed) -> Steps[None]:
    """Content, and calls after the marker in either form."""
    index = 0
    while (yield from passed_on(feed, (OPEN,))):
        if (yield from next_visible(feed)) == "[":
            index = yield from json_list(feed, index, OPEN)
        else:
            index = yield from _by_name(feed, index)


def json_list(feed: Feed, index: int, opening: str = "") -> Steps[int]:
    """A list of named calls; its bracket comes next. Returns the index of the next call."""
    feed.take(1)
    opening += "["
    while True:
        before = index
        if (yield from next_visible(feed)) == "{":
            index = yield from named_call(feed, index, opening, "]")
        else:
            yield Content(opening)
        if index == before:
            return index
        opening = ""
        if (yield from next_visible(feed)) != ",":
            yield from followed(feed, "]")
            return index
        feed.take(1)


def _by_name(feed: Feed, index: int) -> Steps[int]:
    while True:
        if head := _NAME.match(feed.text):
            feed.take(head.end())
            yield CallStart(index, head[1], head[2] if head[2] and _ID.fullmatch(head[2]) else "")
            yield from json_object(feed, index)
            return index + 1
        if feed.ended or "{" in feed.text or OPEN in feed.text:
            yield Content(OPEN)
            return index
        yield None
