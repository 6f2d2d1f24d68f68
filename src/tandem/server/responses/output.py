"""The output of a response: items that grow, and the events that say how."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from typing import Any

from tandem.server.chats.answer_message import Reply
from tandem.server.responses.schemas import Function, qualified
from tandem.server.tools.events import CallArguments, CallStart, Content, Event, Reasoning

Json = dict[str, Any]


class OutputItems:
    """Items so far. Events are dictionaries without `sequence_number`."""

    def __init__(self, reply: Reply, tools: Iterable[Function] = (), ids: Callable[[], str] | None = None) -> None:
        """`tools` may be called. `ids` makes the ids of items, of 32 hex digits; by default they are random."""
        self._spaces = {qualified(tool.namespace, tool.name): tool for tool in tools if tool.namespace}
        self._ids = ids or (lambda: uuid.uuid4().hex)
        self.items: list[Json] = []
        self.reasoning = ""
        """All of the reasoning."""
        self._reply = reply
        self._open: type[Event] | None = None

    def read(self, text: str, *, last: bool) -> list[Json]:
        """Events for new text of the model; with `last` also for what was held back."""
        return [event for read in self._reply.read(text, last=last) for event in self.add(read)]

    def add(self, event: Event) -> list[Json]:
        """Take what the model wrote."""
        if isinstance(event, CallStart):
            return self._start(event)
        events = [] if isinstance(event, self._open or ()) else self._start(event)
        self._part[_FIELDS[type(event)]] += event.text
        if isinstance(event, Reasoning):
            self.reasoning += event.text
        return [*events, self._event(f"{_NAMES[type(event)]}.delta", delta=event.text, **self._logprobs)]

    def close(self, status: str = "completed") -> list[Json]:
        """The last item ends."""
        if self._open is None:
            return []
        kind, item = self._open, self.items[-1]
        text = {_FIELDS[kind]: self._part[_FIELDS[kind]]}
        events = [self._event(f"{_NAMES[kind]}.done", **text, **self._logprobs)]
        if self._part is not item:
            events.append(self._event("response.content_part.done", part=dict(self._part)))
        item["status"] = status
        self._open = None
        return [*events, self._item_event("response.output_item.done")]

    @property
    def _part(self) -> Json:
        """What holds the text that grows."""
        item: Json = self.items[-1]
        return item["content"][0] if "content" in item else item

    @property
    def _logprobs(self) -> Json:
        return {"logprobs": []} if self._open is Content else {}

    def _start(self, event: Event) -> list[Json]:
        events = self.close()
        fresh = self._ids()
        part: Json | None = None
        item: Json
        if isinstance(event, CallStart):
            self._open = CallArguments
            item = {"type": "function_call", "id": f"fc_{fresh}", "call_id": self._reply.call_id("call", event),
                    **self._named(event.name), "arguments": ""}
        elif isinstance(event, Reasoning):
            self._open, part = Reasoning, {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "id": f"rs_{fresh}", "summary": [], "content": []}
        else:
            self._open, part = Content, {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "id": f"msg_{fresh}", "role": "assistant", "content": []}
        self.items.append({**item, "status": "in_progress"})
        events.append(self._item_event("response.output_item.added"))
        if part is not None:
            self.items[-1]["content"] = [part]
            events.append(self._event("response.content_part.added", part=dict(part)))
        return events

    def _named(self, name: str) -> Json:
        """The function that the model calls `name`, as its client calls it."""
        tool = self._spaces.get(name)
        return {"name": name} if tool is None else {"name": tool.name, "namespace": tool.namespace}

    def _item_event(self, kind: str) -> Json:
        item = dict(self.items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: Any) -> Json:
        event = {"type": kind, "output_index": len(self.items) - 1, "item_id": self.items[-1]["id"], **fields}
        return event if self._open is CallArguments else {**event, "content_index": 0}


_FIELDS: dict[type[Event], str] = {Content: "text", Reasoning: "text", CallArguments: "arguments"}
_NAMES: dict[type[Event], str] = {
    Content: "response.output_text",
    Reasoning: "response.reasoning_text",
    CallArguments: "response.function_call_arguments",
}
