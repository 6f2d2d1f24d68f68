"""Llama 3: the whole answer is `{"name": ..., "parameters": {...}}`, several joined by `;`, perhaps after a tag."""

from __future__ import annotations

from tandem.server.tools.scan import SPACE, Feed, Steps, everything, followed, named_call, next_visible

TAG = "<|python_tag|>"
_KEYS = ('"name"', '"parameters"', '"arguments"', '"type"', '"function"')


def llama3(feed: Feed) -> Steps[None]:
    """Calls if the answer begins with one, else content."""
    if (yield from next_visible(feed)) == "<":
        yield from followed(feed, TAG)
    index = 0
    while (yield from next_visible(feed, SPACE + ";" if index else SPACE)) == "{" and (yield from _may_be_call(feed)):
        before = index
        index = yield from named_call(feed, index, "", "")
        if index == before:
            return
    yield from everything(feed)


def _may_be_call(feed: Feed) -> Steps[bool]:
    """Is the first key of the object one that calls have? An answer may be JSON of another kind."""
    while True:
        key = feed.text[1:].lstrip()
        if any(key.startswith(known) for known in _KEYS):
            return True
        if feed.ended or not any(known.startswith(key) for known in _KEYS):
            return False
        yield None
