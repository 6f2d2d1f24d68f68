"""Events that parsers yield from a model's text."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Piece of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Piece of the reasoning's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Start of a tool call; its arguments follow."""

    index: int
    """Index of the call in the answer, from 0."""
    name: str
    id: str = ""
    """Id written by the model, if any; its chat template expects the same id in the history."""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """Piece of a call's arguments; all pieces together are a JSON object."""

    index: int
    text: str


Event = Content | ReasoningText | CallStart | CallArguments


def merged(events: list[Event]) -> list[Event]:
    """Join adjacent pieces of one type, and drop empty ones."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart) or isinstance(last, CallStart | None) or type(last) is not type(event):
            joined += [event] if isinstance(event, CallStart) or event.text else []
        else:
            joined[-1] = replace(last, text=last.text + event.text)
    return joined
