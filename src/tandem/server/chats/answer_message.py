"""The text of one chat answer as OpenAI's messages: content, reasoning and tool calls, whole or in pieces."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from tandem.json_types import JsonObject
from tandem.server.chats.plan import ChatPlan
from tandem.server.tools.deltas import CallStart, Content, Event, ReasoningText
from tandem.server.tools.scan import StreamParser


class Reply:
    """Reads the text of one choice."""

    def __init__(self, plan: ChatPlan, ids: Callable[[], str] | None = None) -> None:
        """`ids` makes the ids of calls, of 32 hex digits; by default they are random."""
        self._ids = ids or (lambda: uuid.uuid4().hex)
        self._used: set[str] = set()
        self._plan = plan
        self._parser = StreamParser(plan.output_parser.reader) if plan.output_parser is not None else None

    def read(self, text: str, *, last: bool) -> list[Event]:
        """Return the events that `text` adds; with `last` also those held back."""
        if self._parser is None:
            return [Content(text)] if text else []
        events = self._parser.push(text)
        if last:
            events = events + self._parser.finish()
        return [event for event in events if not (self._plan.hides_reasoning and isinstance(event, ReasoningText))]

    @property
    def called(self) -> bool:
        """True if there have been calls."""
        return self._parser is not None and self._parser.calls > 0

    def finish_reason(self, reason: str) -> str:
        """Return OpenAI's reason: an answer that ends with calls says so."""
        return self._plan.calls_finish if self.called and reason == "stop" else reason

    def delta(self, event: Event) -> JsonObject:
        """The `delta` of a chunk."""
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
        """Return the message object of a whole answer."""
        whole = WholeMessage()
        for event in self.read(text, last=True):
            whole.add(self.delta(event))
        return whole.message()

    def _call(self, call: CallStart) -> dict[str, object]:
        function = {"name": call.name, "arguments": ""}
        return {"id": self.call_id("call", call), "type": "function", "function": function}

    def call_id(self, prefix: str, call: CallStart) -> str:
        """Return the id that the model gave `call`, if it is the only one with it; else a fresh one."""
        fresh = self._ids()
        if call.id and call.id not in self._used:
            self._used.add(call.id)
            return call.id
        return fresh[:9] if self._plan.short_ids else f"{prefix}_{fresh[:24]}"


class WholeMessage:
    """A message put together from its pieces."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[JsonObject] = []

    def add(self, delta: JsonObject) -> None:
        """The next piece, as `Reply.delta` has it."""
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
