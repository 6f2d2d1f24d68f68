"""Build a response of the Responses API: its object, output items and stream events."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable

from starlette.responses import Response

from tandem.errors import RequestError
from tandem.json_types import JsonObject
from tandem.server.chats.answer_message import Reply
from tandem.server.failures import envelope
from tandem.server.generation import Delta, Generation
from tandem.server.responses.schemas import Function, ResponsesRequest, qualified
from tandem.server.sse import AnswerWriter, json_response, named_event
from tandem.server.tools.deltas import CallArguments, CallStart, Content, Event, ReasoningText


def empty_response(fields: ResponsesRequest, response_id: str, model: str, created: int, status: str) -> JsonObject:
    """Return a response object without output that echoes the request's parameters, with defaults filled in."""
    form = fields.text.format if fields.text is not None else None
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "completed_at": None,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": [],
        "usage": None,
        "background": bool(fields.background),
        "store": bool(fields.background),
        "previous_response_id": fields.previous_response_id or None,
        "truncation": "disabled",
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "metadata": fields.metadata or {},
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "reasoning": fields.reasoning.model_dump(exclude={"max_tokens"}) if fields.reasoning is not None else None,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": {"format": form.model_dump(by_alias=True, exclude_none=True) if form else {"type": "text"}},
        "tool_choice": fields.tool_choice or "auto",
        "tools": [tool.model_dump() for tool in fields.functions],
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
    }


def error_event(error: RequestError) -> JsonObject:
    """Return the `error` event that ends a failed stream, without `sequence_number`."""
    fields = envelope(error)["error"]
    return {"type": "error", **{name: fields[name] for name in ("code", "message", "param")}}


class Answering(AnswerWriter):
    """Converter of a generation's deltas to the events and the object of one response."""

    done = b""

    def __init__(self, fields: ResponsesRequest, generation: Generation, model: str, output: OutputItems, created: int) -> None:
        """`created`: seconds since 1970."""
        params = generation.params
        self._start = {
            **empty_response(fields, generation.request_id, model, created, "in_progress"),
            "temperature": params.temperature,
            "top_p": params.top_p,
        }
        self.generation = generation
        self.created = created
        self.keep: Callable[[], Awaitable[None]] | None = None
        """Function that stores the finished response; None without `store`."""
        self._output = output
        self._status = "in_progress"
        self._completed_at: int | None = None
        self._sent = 0
        self.stored = False
        """True if the response is stored or about to be."""

    async def whole(self, answer: Delta) -> Response:
        """Return the HTTP response for a complete answer."""
        self.take(answer)
        await self.end()
        return json_response(self.response())

    def head(self) -> bytes:
        """Return the events `response.created` and `response.in_progress`."""
        kinds = ("response.created", "response.in_progress")
        return self._events([{"type": kind, "response": self.response()} for kind in kinds])

    def take(self, delta: Delta) -> list[JsonObject]:
        """Process new text and return its events as dictionaries."""
        ended = delta.finish_reason is not None
        events = self._output.read(delta.text, last=ended)
        if ended:
            self._status = "incomplete" if delta.finish_reason == "length" else "completed"
            self._completed_at = int(time.time()) if self._status == "completed" else None
            events += self._output.close(self._status)
        return events

    async def end(self) -> None:
        """Store the finished response, if requested, before the client gets the last event."""
        self.stored = self.keep is not None
        if self.keep is not None:
            await self.keep()

    def delta(self, delta: Delta, extras: JsonObject | None) -> bytes:
        """Return the encoded events for new text."""
        return self._events(self.take(delta))

    def usage(self, usage: JsonObject, extras: JsonObject) -> bytes:
        """Return the final event, with the whole response object."""
        return self._events([{"type": f"response.{self._status}", "response": self.response()}])

    def last_event(self) -> bytes:
        """Return the final event as it is stored, without advancing the sequence number."""
        event = {"type": f"response.{self._status}", "response": self.response(), "sequence_number": self._sent}
        return named_event(event)

    def error(self, error: RequestError) -> bytes:
        """Return the event `response.failed`."""
        why = {"code": error.code or error.kind, "message": error.message}
        failed = {**self.response(), "status": "failed", "error": why}
        return self._events([{"type": "response.failed", "response": failed}])

    def response(self) -> JsonObject:
        """Return the current response object."""
        cut, over = self._status == "incomplete", self._status != "in_progress"
        return {
            **self._start,
            "store": self._start["store"] or self.stored,
            "status": self._status,
            "completed_at": self._completed_at,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": self._output.items,
            "usage": self._usage() if over else None,
        }

    def _usage(self) -> JsonObject:
        """Return the usage. Reasoning tokens are counted from its text if the generation does not count them."""
        counted = self.generation.usage()
        output = counted["completion_tokens"]
        details = counted.get("completion_tokens_details")
        if details is None:
            thought = self.generation.tokenizer.encode(self._output.reasoning, add_special_tokens=False)
            details = {"reasoning_tokens": min(len(thought), output)}
        return {
            "input_tokens": counted["prompt_tokens"],
            "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": output,
            "output_tokens_details": details,
            "total_tokens": counted["total_tokens"],
        }

    def _events(self, events: list[JsonObject]) -> bytes:
        written = b""
        for event in events:
            written += named_event({**event, "sequence_number": self._sent})
            self._sent += 1
        return written


class OutputItems:
    """Builder of output items. Methods return events as dictionaries without `sequence_number`."""

    def __init__(self, reply: Reply, tools: Iterable[Function], response_id: str) -> None:
        """`tools`: tools that may be called. Item ids are numbered within the response, and so name it."""
        self._spaces = {qualified(tool.namespace, tool.name): tool for tool in tools if tool.namespace}
        self._response = response_id.partition("_")[2]
        self.items: list[JsonObject] = []
        self.reasoning = ""
        """Whole reasoning text so far."""
        self._reply = reply
        self._open: type[Event] | None = None

    def read(self, text: str, *, last: bool) -> list[JsonObject]:
        """Return the events for new text of the model; with `last` (end of the text) also for text held back."""
        return [event for read in self._reply.read(text, last=last) for event in self.add(read)]

    def add(self, event: Event) -> list[JsonObject]:
        """Add a parser event to the items and return the resulting events."""
        if isinstance(event, CallStart):
            return self._start(event)
        events = [] if isinstance(event, self._open or ()) else self._start(event)
        self._part[_FIELDS[type(event)]] += event.text
        if isinstance(event, ReasoningText):
            self.reasoning += event.text
        return [*events, self._event(f"{_NAMES[type(event)]}.delta", delta=event.text, **self._logprobs)]

    def close(self, status: str = "completed") -> list[JsonObject]:
        """Close the open item, if any, and return the events for that."""
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
    def _part(self) -> JsonObject:
        """Dictionary that holds the growing text: the last item's content part, or the item itself."""
        item: JsonObject = self.items[-1]
        return item["content"][0] if "content" in item else item

    @property
    def _logprobs(self) -> JsonObject:
        return {"logprobs": []} if self._open is Content else {}

    def _start(self, event: Event) -> list[JsonObject]:
        events = self.close()
        fresh = f"{self._response}{len(self.items):04x}"
        part: JsonObject | None = None
        item: JsonObject
        if isinstance(event, CallStart):
            self._open = CallArguments
            item = {
                "type": "function_call",
                "id": f"fc_{fresh}",
                "call_id": self._reply.call_id("call", event),
                **self._named(event.name),
                "arguments": "",
            }
        elif isinstance(event, ReasoningText):
            self._open, part = ReasoningText, {"type": "reasoning_text", "text": ""}
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

    def _named(self, name: str) -> JsonObject:
        """Return `name`, and `namespace` if any, of the function with the qualified name `name`."""
        tool = self._spaces.get(name)
        return {"name": name} if tool is None else {"name": tool.name, "namespace": tool.namespace}

    def _item_event(self, kind: str) -> JsonObject:
        item = dict(self.items[-1])
        if "content" in item:
            item["content"] = [dict(part) for part in item["content"]]
        return {"type": kind, "output_index": len(self.items) - 1, "item": item}

    def _event(self, kind: str, **fields: object) -> JsonObject:
        event = {"type": kind, "output_index": len(self.items) - 1, "item_id": self.items[-1]["id"], **fields}
        return event if self._open is CallArguments else {**event, "content_index": 0}


_FIELDS: dict[type[Event], str] = {Content: "text", ReasoningText: "text", CallArguments: "arguments"}
_NAMES: dict[type[Event], str] = {
    Content: "response.output_text",
    ReasoningText: "response.reasoning_text",
    CallArguments: "response.function_call_arguments",
}
