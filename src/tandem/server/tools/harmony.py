"""gpt-oss: messages on channels. `analysis` is reasoning, a recipient makes a call, the rest is content."""

from __future__ import annotations

import re

from tandem.server.tools.events import CallArguments, CallStart, Content, Reasoning
from tandem.server.tools.scan import Feed, Steps, begun, first, held, next_visible, passed_on

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def harmony(feed: Feed) -> Steps[None]:
    """Every message in turn; text before any channel is content."""
    index = 0
    while (yield from next_visible(feed)):
        header, marker = yield from held(feed, (MESSAGE,))
        if not marker:
            if not any(token in header for token in (CHANNEL, START)):
                yield Content(header)
            return
        before, _, channel = header.rpartition(CHANNEL)
        text = before.split(START)[0]
        if text.strip() not in ("", "assistant") and not _RECIPIENT.search(text):
            yield Content(text)
        if recipient := _RECIPIENT.search(header):
            yield CallStart(index, recipient[1])
            yield from _arguments(feed, index)
            index += 1
        else:
            yield from passed_on(feed, ENDS, Reasoning if channel.strip().startswith("analysis") else Content)


def _arguments(feed: Feed, index: int) -> Steps[None]:
    yield from next_visible(feed)
    while True:
        place, marker = first(feed.text, ENDS)
        if not marker and not feed.ended:
            place -= begun(feed.text, ENDS)
        if place:
            yield CallArguments(index, feed.take(place))
        if marker or feed.ended:
            feed.take(len(marker))
            return
        yield None
