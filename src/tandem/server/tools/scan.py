"""Building blocks of streaming parsers: the feed of text, and generators (readers) over it.

A reader yields events, and yields None when it needs more text or the end of the text. "Return" in the docstrings of
generators here means the value of `yield from`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TypeVar

from tandem.json_types import JsonMapping
from tandem.server.tools.deltas import CallStart, Content, Event, ReasoningText, merged

T = TypeVar("T")
Steps = Generator[Event | None, None, T]
Tools = Mapping[str, JsonMapping]
"""JSON schemas of the tools' arguments, by tool name."""
SPACE = " \t\r\n"


class Feed:
    """Received text that is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self.dropped: tuple[str, ...] = ()
        """Markers to remove from content."""

    def take(self, count: int) -> str:
        """Remove and return the first `count` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken


Reader = Callable[[Feed], Steps[None]]


class StreamParser:
    """Driver of a reader over chunks of text; the joined events do not depend on the chunking."""

    def __init__(self, reader: Reader) -> None:
        self._feed = Feed()
        self._steps = reader(self._feed)
        self._space = ""
        self.calls = 0
        """Number of tool calls so far."""

    def push(self, text: str) -> list[Event]:
        """Append `text` and return the events that are certain now."""
        self._feed.text += text
        return self._run()

    def finish(self) -> list[Event]:
        """End the text and return the remaining events."""
        self._feed.ended = True
        events = self._run()
        if self._space and not self.calls:
            events.append(Content(self._space))
        return merged(events)

    def _run(self) -> list[Event]:
        events: list[Event] = []
        for event in self._steps:
            if event is None:
                break
            events += self._tidied(event)
        return merged(events)

    def _tidied(self, event: Event) -> list[Event]:
        """Hold back white space after content, and drop it before a call, where it is only layout."""
        if isinstance(event, Content):
            text = self._space + event.text
            kept = text.rstrip()
            if not kept:
                self._space = text
                return []
            self._space = text[len(kept) :]
            return [Content(kept)]
        if isinstance(event, CallStart):
            self._space = ""
            self.calls += 1
        return [event]


def first(text: str, markers: Sequence[str], start: int = 0) -> tuple[int, str]:
    """Return offset and text of the first marker from `start` on; the text's length and "" if there is none."""
    places = [(place, marker) for marker in markers if (place := text.find(marker, start)) >= 0]
    return min(places, default=(len(text), ""))


def begun(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def passed_on(feed: Feed, markers: Sequence[str], kind: Callable[[str], Event] = Content) -> Steps[str]:
    """Yield text as events of `kind` up to the first of `markers`; consume and return the marker, or "" at the end."""
    seen = (*markers, *feed.dropped)
    while True:
        place, marker = first(feed.text, seen)
        if not marker and not feed.ended:
            place -= begun(feed.text, seen)
        if place:
            yield kind(feed.take(place))
        feed.take(len(marker))
        if marker in markers or (not marker and feed.ended):
            return marker
        if not marker:
            yield None


def held(feed: Feed, markers: Sequence[str]) -> Steps[tuple[str, str]]:
    """Wait for the first of `markers`; consume and return the text before it and the marker; at the end, the rest and ""."""
    while True:
        place, marker = first(feed.text, markers)
        if marker or feed.ended:
            before = feed.take(place)
            return before, feed.take(len(marker))
        yield None


def space(feed: Feed) -> Steps[str]:
    """Consume and return the white space that comes next."""
    taken = ""
    while True:
        rest = feed.text.lstrip()
        taken += feed.take(len(feed.text) - len(rest))
        if rest or feed.ended:
            return taken
        yield None


def everything(feed: Feed) -> Steps[None]:
    """Read all text as content."""
    yield from passed_on(feed, ())


def without(dropped: tuple[str, ...], reader: Reader) -> Reader:
    """Return `reader` with the markers in `dropped` removed from content."""

    def read(feed: Feed) -> Steps[None]:
        feed.dropped = dropped
        yield from reader(feed)

    return read


def thinking(tags: tuple[str, str], answer: Reader, *, begun: bool, ends: tuple[str, ...] = ()) -> Reader:
    """Return a reader of reasoning between `tags`, then of `answer`. `begun`: the prompt has the opening tag already.

    `ends`: markers that also end reasoning, since models omit the closing tag before a call or put it after.
    """
    opening, closing = tags

    def read(feed: Feed) -> Steps[None]:
        before = "" if begun else (yield from space(feed))
        if begun or (yield from followed(feed, opening)):
            yield from next_visible(feed)
            end = yield from passed_on(feed, (closing, *ends), ReasoningText)
            if end in ends:
                feed.text, feed.dropped = end + feed.text, (*feed.dropped, closing)
            yield from next_visible(feed)
        else:
            feed.text = before + feed.text
        yield from answer(feed)

    return read


def next_visible(feed: Feed, skipped: str = SPACE) -> Steps[str]:
    """Consume characters in `skipped`; return the next other character without consuming it, or "" at the end."""
    while True:
        feed.text = feed.text.lstrip(skipped)
        if feed.text or feed.ended:
            return feed.text[:1]
        yield None


def followed(feed: Feed, marker: str) -> Steps[bool]:
    """Consume `marker` if it comes next; return whether it did."""
    while not feed.ended and len(feed.text) < len(marker) and marker.startswith(feed.text):
        yield None
    if not feed.text.startswith(marker):
        return False
    feed.take(len(marker))
    return True
