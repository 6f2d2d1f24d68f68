"""Convert the text of a chat answer to OpenAI's messages or deltas: content, reasoning and tool calls."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from pydantic_core import from_json

from tandem.json_types import JsonObject
from tandem.server.chats.plan import ChatPlan
from tandem.server.tools.deltas import CallStart, Content, Event, ReasoningText
from tandem.server.tools.scan import StreamParser


def arguments_object(text: str) -> JsonObject:
    """Return a call's arguments as an object, as far as complete: the output limit may have cut them off."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class Reply:
    """Parser of one choice's text into events, deltas and messages."""

    def __init__(self, plan: ChatPlan, ids: Callable[[], str] | None = None) -> None:
        """`ids` returns 32 hex digits for each call id; random by default."""
        self._ids = ids or (lambda: uuid.uuid4().hex)
        self._used: set[str] = set()
        self._plan = plan
        self._parser = StreamParser(plan.output_parser.reader) if plan.output_parser is not None else None

    def read(self, text: str, *, last: bool) -> list[Event]:
        """Parse new text and return its events; with `last` (end of the answer) also those held back."""
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.push(text)
        if last:
            events = events + self._parser.finish()
        return [event for event in events if not (self._plan.hides_reasoning and isinstance(event, ReasoningText))]

    @property
    def called(self) -> bool:
        """True if the answer has tool calls so far."""
        return self._parser is not None and self._parser.calls > 0

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's `finish_reason` for the engine's `reason`: `tool_calls` for a complete answer with calls."""
        return self._plan.calls_finish if self.called and reason == "stop" else reason

    def delta(self, event: Event) -> JsonObject:
        """Return an event as the `delta` of a chunk."""
        if isinstance(event, Content):
            return {"content": event.text}
        if isinstance(event, ReasoningText):
            return {"reasoning_content": event.text}
        call: dict[str, object] = {"index": event.index}
        if isinstance(event, CallStart):
            call |= self._call(event)
        else:
            call["function"] = {"arguments": event.text}
        return {"tool_calls": [call]}

    def message(self, text: str) -> dict[str, object]:
        """Return the message object for the whole text of an answer."""
        whole = WholeMessage()
        for event in self.read(text, last=True):
            whole.add(self.delta(event))
        return whole.message()

    def _call(self, call: CallStart) -> dict[str, object]:
        function = {"name": call.name, "arguments": ""}
        return {"id": self.call_id("call", call), "type": "function", "function": function}

    def call_id(self, prefix: str, call: CallStart) -> str:
        """Return the model's id of `call` if it is unique in the answer, else a new one that starts with `prefix`."""
        fresh = self._ids()
        if call.id and call.id not in self._used:
            self._used.add(call.id)
            return call.id
        return fresh[:9] if self._plan.short_ids else f"{prefix}_{fresh[:24]}"


class WholeMessage:
    """Message assembled from deltas."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[JsonObject] = []

    def add(self, delta: JsonObject) -> None:
        """Append a delta of `Reply.delta`."""
        self._content.append(delta.get("content", ""))
        self._reasoning.append(delta.get("reasoning_content", ""))
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                call = {name: value for name, value in piece.items() if name != "index"}
                self._calls.append({**call, "function": dict(call["function"])})
            else:
                self._calls[piece["index"]]["function"]["arguments"] += piece["function"]["arguments"]

    def message(self) -> dict[str, object]:
        """Return the message so far."""
        content, reasoning = "".join(self._content), "".join(self._reasoning)
        message: dict[str, object] = {"role": "assistant", "content": content or (None if self._calls else ""), "refusal": None}
        if reasoning:
            message["reasoning_content"] = reasoning
        if self._calls:
            message["tool_calls"] = self._calls
        return message
