"""Harmony format of gpt-oss: messages on channels. `analysis` is reasoning, a recipient makes a call, else content."""

from __future__ import annotations

import re
from functools import partial

from tandem.server.tools.deltas import CallArguments, CallStart, Content, ReasoningText
from tandem.server.tools.scan import Feed, Steps, held, next_visible, passed_on

CHANNEL, MESSAGE, START, CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>", START)
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


def harmony(feed: Feed) -> Steps[None]:
    """Read messages one by one; text before the first channel is content."""
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
            yield from next_visible(feed)
            yield from passed_on(feed, ENDS, partial(CallArguments, index))
            index += 1
        else:
            yield from passed_on(feed, ENDS, ReasoningText if channel.strip().startswith("analysis") else Content)
