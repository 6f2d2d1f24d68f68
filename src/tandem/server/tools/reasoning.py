"""Reasoning before the answer, between two tags."""

from __future__ import annotations

from tandem.server.tools.events import Reasoning
from tandem.server.tools.scan import Feed, Reader, Steps, followed, next_visible, passed_on, space


def thinking(tags: tuple[str, str], answer: Reader, *, begun: bool, ends: tuple[str, ...] = ()) -> Reader:
    """A reader of reasoning between `tags`, then of `answer`. `begun`: the prompt holds the opening tag already.

    `ends` begin an answer too: models leave out the closing tag before a call.
    """
    opening, closing = tags

    def read(feed: Feed) -> Steps[None]:
        before = "" if begun else (yield from space(feed))
        if begun or (yield from followed(feed, opening)):
            yield from next_visible(feed)
            end = yield from passed_on(feed, (closing, *ends), Reasoning)
            feed.text = (end if end in ends else "") + feed.text
            yield from next_visible(feed)
        else:
            feed.text = before + feed.text
        yield from answer(feed)

    return read
