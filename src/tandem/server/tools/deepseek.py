"""DeepSeek V3, R1 and V3.1: calls between special tokens with a separator after the name or the kind of call."""

from __future__ import annotations

import re

from tandem.server.tools.events import CallStart, Content
from tandem.server.tools.scan import Feed, Steps, held, json_object, sectioned

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, ONE_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
_OLD = re.compile(r"\s*([^\s`{]+)\s*```(?:json)?\s*(?=\{)")
_BODY = re.compile(r"\s*(?=\{)")


def deepseek(feed: Feed) -> Steps[None]:
    """Content, and calls between the tokens: `function SEP name ```json {} ``` ` (V3) or `name SEP {}` (V3.1)."""
    return sectioned(feed, ALL, ALL_END, ONE, _call)


def _call(feed: Feed, index: int) -> Steps[int]:
    before, marker = yield from held(feed, (SEPARATOR, ONE_END))
    if marker != SEPARATOR:
        yield Content(ONE + before + marker)
        return index
    while True:
        place = feed.text.find(ONE_END)
        head = _BODY.match(feed.text) or _OLD.match(feed.text)
        if head and (place < 0 or head.end() <= place):
            feed.take(head.end())
            yield CallStart(index, head[1] if head.re is _OLD else before.strip())
            yield from json_object(feed, index)
            yield from held(feed, (ONE_END,))
            return index + 1
        if place >= 0 or feed.ended:
            body, end = yield from held(feed, (ONE_END,))
            yield Content(ONE + before + SEPARATOR + body + end)
            return index
        yield None
