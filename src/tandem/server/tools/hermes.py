"""Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, as often as there are calls."""

from __future__ import annotations

from tandem.server.tools.scan import Feed, Steps, named_call, passed_on

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def hermes(feed: Feed) -> Steps[None]:
    """Content, and calls between the two tags."""
    index = 0
    while (yield from passed_on(feed, (OPEN,))):
        index = yield from named_call(feed, index, OPEN, CLOSE)
