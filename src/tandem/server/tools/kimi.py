"""Kimi K2: calls in a section of their own, each with the id that the model counts and its arguments as JSON."""

from __future__ import annotations

import re

from tandem.server.tools.events import CallStart, Content
from tandem.server.tools.scan import Feed, Steps, held, json_object, next_visible, sectioned

ALL, ALL_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
ONE, ARGUMENTS, ONE_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
TOKENS = (ALL, ALL_END, ONE, ARGUMENTS, ONE_END)
_ID = re.compile(r"\s*((?:functions\.)?([\w.-]+):\d+)\s*")


def kimi(feed: Feed) -> Steps[None]:
    """Content, and calls as `functions.name:0 ARGUMENTS {}` between their tokens."""
    return sectioned(feed, ALL, ALL_END, ONE, _call)


def _call(feed: Feed, index: int) -> Steps[int]:
    before, marker = yield from held(feed, (ARGUMENTS, ONE_END))
    name = _ID.fullmatch(before)
    if marker != ARGUMENTS or not name or (yield from next_visible(feed)) != "{":
        yield Content(ONE + before + marker)
        return index
    yield CallStart(index, name[2], name[1])
    yield from json_object(feed, index)
    yield from held(feed, (ONE_END,))
    return index + 1
