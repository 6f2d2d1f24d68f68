"""Translate requests of the Responses API to chat requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tandem.json_types import JsonObject
from tandem.server.body_validation import checked, in_words
from tandem.server.openai.schemas import ChatRequest
from tandem.server.responses.schemas import Form, Function, Item, Part, ResponsesRequest, qualified

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "thinking_token_budget": "reasoning.max_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""Field names of this API, by field name of a chat request."""


def chat_request(fields: ResponsesRequest) -> ChatRequest:
    """Return the equivalent chat request. Raises RequestError."""
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention")
    data: JsonObject = {name: getattr(fields, name) for name in same}
    data |= {"messages": _conversation(fields), "max_tokens": fields.max_output_tokens}
    data["tool_choice"] = fields.tool_choice
    if isinstance(fields.tool_choice, dict):
        data["tool_choice"] = {"type": "function", "function": {"name": fields.tool_choice["name"]}}
    if fields.functions:
        data["tools"] = [_tool(tool) for tool in fields.functions]
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        data["reasoning_effort"] = fields.reasoning.effort
    if fields.reasoning is not None and fields.reasoning.max_tokens is not None:
        data["thinking_token_budget"] = fields.reasoning.max_tokens
    if fields.text is not None and fields.text.format is not None:
        data["response_format"] = _format(fields.text.format)
    with in_words(NAMES):
        return checked(data, ChatRequest)


def _conversation(fields: ResponsesRequest) -> list[JsonObject]:
    messages: list[_Message] = []
    if fields.instructions:
        _last(messages, "system").add("content", fields.instructions)
    for item in fields.input:
        if item.type == "function_call_output":
            messages.append(_Message("tool", {"tool_call_id": item.call_id, "content": _content(item.output)}))
        elif item.type == "message" and item.role == "user":
            messages.append(_Message("user", {"content": _content(item.content)}))
        elif item.type == "message" and item.role != "assistant":
            _last(messages, "system").add("content", _text(item.content))
        else:
            _take(_last(messages, "assistant"), item)
    return [message.whole() for message in messages]


@dataclass
class _Message:
    """Chat message built from adjacent items of one role."""

    role: str
    others: JsonObject
    texts: dict[str, list[str]] = field(default_factory=lambda: {"content": []})
    """Texts by field, joined at the end."""

    def add(self, name: str, text: str) -> None:
        """Append `text`, unless empty, to the field `name`."""
        if text:
            self.texts.setdefault(name, []).append(text)

    def whole(self) -> JsonObject:
        """Return the message of a chat request."""
        between = "\n\n" if self.role == "system" else "\n"
        return {"role": self.role, **{name: between.join(texts) for name, texts in self.texts.items()}, **self.others}


def _last(messages: list[_Message], role: str) -> _Message:
    """Return the last message if it has this role, else append one: templates expect no adjacent messages of one role."""
    if not messages or messages[-1].role != role:
        messages.append(_Message(role, {}))
    return messages[-1]


def _take(message: _Message, item: Item) -> None:
    """Add an item to the assistant's message."""
    if item.type == "message":
        message.add("content", _text(item.content))
    elif item.type == "reasoning":
        message.add("reasoning_content", _text(item.content or item.summary))
    else:
        function = {"name": qualified(item.namespace, item.name or ""), "arguments": item.arguments}
        message.others.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


def _text(parts: Iterable[Part] | None) -> str:
    return "".join(part.text or "" for part in parts or ())


def _content(parts: Iterable[Part] | None) -> list[JsonObject]:
    """Return the content parts of a chat message."""
    return [
        {"type": "text", "text": part.text}
        if part.image_url is None
        else {"type": "image_url", "image_url": {"url": part.image_url, "detail": part.detail or "auto"}}
        for part in parts or ()
    ]


def _tool(tool: Function) -> JsonObject:
    function = tool.model_dump(exclude={"type", "namespace"})
    return {"type": "function", "function": {**function, "name": qualified(tool.namespace, tool.name)}}


def _format(form: Form) -> JsonObject:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"name": form.name or "output", "schema": form.schema_}}
