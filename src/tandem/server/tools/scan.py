"""Reading a text that is still coming: a feed, generators over it, and what all formats need.

A reader yields events, and None when it can say no more until there is more text or the text has ended.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, TypeVar

from tandem.server.tools.events import CallArguments, CallStart, Content, Event, Reasoning, merged

T = TypeVar("T")
Steps = Generator[Event | None, None, T]
Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of each tool's arguments, by the tool's name."""
SPACE = " \t\r\n"
_JSON_OUTSIDE_STRINGS = frozenset("0123456789+-.eE,: \t\r\ntrufalsn")
_MEMBER = re.compile(r'\s*,\s*"[^"\\}]*"\s*:\s*(?:"[^"\\}]*"|[^\s"{}\[\],]+)(?=\s*[,}])')
_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]+)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')


class Feed:
    """Text that has come and is not read yet."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False

    def take(self, count: int) -> str:
        """Remove and return the first `count` characters."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken


Reader = Callable[[Feed], Steps[None]]


class StreamParser:
    """Runs a reader over text in pieces; what `push` and `finish` return adds up to the same, however it is cut."""

    def __init__(self, reader: Reader) -> None:
        self._feed = Feed()
        self._steps = reader(self._feed)
        self._space = ""
        self.calls = 0
        """Calls that have begun."""

    def push(self, text: str) -> list[Event]:
        """What can be said now that `text` has come."""
        self._feed.text += text
        return self._run()

    def finish(self) -> list[Event]:
        """What is left, now that no more text comes."""
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
        """Hold back white space after content: beside calls it is no content but their layout."""
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


def first(text: str, markers: Sequence[str]) -> tuple[int, str]:
    """Place of the marker that comes first, and the marker; the text's length and "" if there is none."""
    found = [(place, marker) for marker in markers if (place := text.find(marker)) >= 0]
    return min(found, default=(len(text), ""))


def begun(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of `text` that may be the beginning of a marker."""
    longest = max(map(len, markers), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(marker.startswith(text[-length:]) for marker in markers):
            return length
    return 0


def passed_on(feed: Feed, markers: Sequence[str], kind: type[Content] | type[Reasoning] = Content) -> Steps[str]:
    """Hand on text up to the first of `markers`; returns the marker, which is taken, or "" at the end."""
    while True:
        place, marker = first(feed.text, markers)
        if not marker and not feed.ended:
            place -= begun(feed.text, markers)
        if place:
            yield kind(feed.take(place))
        if marker or feed.ended:
            return feed.take(len(marker))
        yield None


def sectioned(feed: Feed, section: str, end: str, one: str, call: Callable[[Feed, int], Steps[int]]) -> Steps[None]:
    """Content, and calls that begin with `one`, in a section of their own or without it.

    `call` reads one of which the marker is taken; it is given the call's index, and returns that of the next.
    """
    index = 0
    while marker := (yield from passed_on(feed, (section, end, one))):
        if marker == one:
            index = yield from call(feed, index)
        if index or marker == section:
            yield from next_visible(feed)


def held(feed: Feed, markers: Sequence[str]) -> Steps[tuple[str, str]]:
    """Wait for the first of `markers`; returns the text before it and the marker, or all that is left and ""."""
    while True:
        place, marker = first(feed.text, markers)
        if marker or feed.ended:
            before = feed.take(place)
            return before, feed.take(len(marker))
        yield None


def everything(feed: Feed) -> Steps[None]:
    """All text is content."""
    yield from passed_on(feed, ())


def next_visible(feed: Feed, skipped: str = SPACE) -> Steps[str]:
    """The next character that is none of `skipped`, which are taken; "" at the end."""
    while True:
        feed.text = feed.text.lstrip(skipped)
        if feed.text or feed.ended:
            return feed.text[:1]
        yield None


def followed(feed: Feed, marker: str) -> Steps[bool]:
    """Take `marker` if it comes next."""
    while not feed.ended and len(feed.text) < len(marker) and marker.startswith(feed.text):
        yield None
    if not feed.text.startswith(marker):
        return False
    feed.take(len(marker))
    return True


def json_object(feed: Feed, index: int) -> Steps[None]:
    """Hand on the JSON object that begins here as the arguments of call `index`, up to its end or what is no JSON."""
    depth, quoted, escaped = 0, False, False
    while True:
        length = 0
        for char in feed.text:
            if quoted:
                quoted, escaped = escaped or char != '"', char == "\\" and not escaped
            elif char == '"':
                quoted = True
            elif char in "{[":
                depth += 1
            elif char in "}]":
                depth -= 1
            elif char not in _JSON_OUTSIDE_STRINGS:
                depth = 0
                break
            length += 1
            if not depth:
                break
        if length:
            yield CallArguments(index, feed.take(length))
        if not depth or feed.ended:
            return
        yield None


def named_call(feed: Feed, index: int, opening: str, closing: str) -> Steps[int]:
    """A call as `{"name": ..., "arguments": {...}}` before `closing`; returns the index of the next call.

    Arguments stream when the name comes first; otherwise the call is read when it is complete. What is none becomes
    content, with its `opening` and `closing`. An empty `closing` stands for the end of the text.
    """
    while True:
        head = _HEAD.match(feed.text)
        place, marker = first(feed.text, (closing,)) if closing else (len(feed.text), "")
        if head and (not marker or head.end() <= place):
            feed.take(head.end())
            yield CallStart(index, head[1])
            yield from json_object(feed, index)
            yield from _members(feed)
            if (yield from next_visible(feed, SPACE + "}")) and closing:
                yield from followed(feed, closing)
            return index + 1
        if marker or feed.ended:
            body = feed.take(place)
            feed.take(len(marker))
            calls = whole_calls(body)
            if not calls:
                yield Content(opening + body + marker)
            for name, arguments in calls:
                yield CallStart(index, name)
                yield CallArguments(index, arguments)
                index += 1
            return index
        yield None


def _members(feed: Feed) -> Steps[None]:
    """Take what stands in a call after its arguments, such as an "id"."""
    while True:
        if member := _MEMBER.match(feed.text):
            feed.take(member.end())
        elif feed.ended or "}" in feed.text or feed.text.lstrip()[:1] not in ("", ","):
            return
        else:
            yield None


def dumped(value: Any) -> str:
    """A value that a model wrote as JSON that can be sent. Raises ValueError for numbers that are not finite."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode()


def whole_calls(text: str) -> list[tuple[str, str]]:
    """Names and arguments of a complete JSON text: a call, or a list of them; none if it is anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = []
    for call in value if isinstance(value, list) else [value]:
        if not isinstance(call, dict):
            return []
        inner = call.get("function")
        call = inner if isinstance(inner, dict) else call
        if not ({"arguments", "parameters"} & call.keys() or call.keys() <= {"name", "id", "type"}):
            return []  # an answer in JSON that has a name
        name, arguments = call.get("name"), call.get("arguments", call.get("parameters", {}))
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except (ValueError, RecursionError):
                return []
        if not isinstance(name, str) or not isinstance(arguments, dict | None):
            return []
        try:
            calls.append((name.encode("utf-8", "replace").decode(), dumped(arguments or {})))
        except ValueError:
            return []
    return calls
