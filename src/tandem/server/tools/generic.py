"""A JSON list of calls and nothing else: how calls are forced from models whose own format cannot be."""

from __future__ import annotations

from tandem.server.tools.mistral import json_list
from tandem.server.tools.scan import Feed, Steps, everything, next_visible


def generic(feed: Feed) -> Steps[None]:
    """Calls if the text is a list of them, else content."""
    if (yield from next_visible(feed)) == "[":
        yield from json_list(feed, 0)
    yield from everything(feed)
