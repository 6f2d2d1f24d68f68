"""Reasoning before the answer, between two tags."""

from __future__ import annotations

from tandem.server.tools.events import Reasoning
from tandem.server.tools.scan import Feed, Reader, Steps, followed, next_visible, passed_on


def thinking(tags: tuple[str, str], answer: Reader, *, begun: bool) -> Reader:
    """A reader of reasoning between `tags`, then of `answer`. `begun`: the prompt holds the opening tag already."""
    opening, closing = tags

    def read(feed: Feed) -> Steps[None]:
        space = ""
        if not begun:
            space = yield from _space(feed)
        if begun or (yield from followed(feed, opening)):
            yield from next_visible(feed)
            yield from passed_on(feed, (closing,), Reasoning)
            yield from next_visible(feed)
        else:
            feed.text = space + feed.text
        yield from answer(feed)

    return read


def _space(feed: Feed) -> Steps[str]:
    """White space that comes next, taken."""
    space = ""
    while True:
        rest = feed.text.lstrip()
        space += feed.take(len(feed.text) - len(rest))
        if rest or feed.ended:
            return space
        yield None
