"""Events that readers yield from a model's text."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Text of the thinking before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins; its arguments follow."""

    index: int
    """Counts the calls of one answer from 0."""
    name: str
    id: str = ""
    """The id that the model gave, if any; its template wants to see the same again."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of a call's arguments, which together are the text of a JSON object."""

    index: int
    text: str


Event = Content | ReasoningText | CallStart | CallArguments


def merged(events: list[Event]) -> list[Event]:
    """Join neighbouring pieces of one kind, and leave out empty ones."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart) or isinstance(last, CallStart | None) or type(last) is not type(event):
            joined += [event] if isinstance(event, CallStart) or event.text else []
        else:
            joined[-1] = replace(last, text=last.text + event.text)
    return joined
