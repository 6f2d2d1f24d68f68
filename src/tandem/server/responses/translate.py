"""Responses requests as chat requests. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from tandem.errors import RequestError
from tandem.server.openai.schemas import ChatRequest
from tandem.server.responses.schemas import Form, Function, Item, ResponsesRequest, TextPart, qualified
from tandem.server.validation import checked, renamed

_NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "response_format.json_schema.schema": "text.format.schema",
}
"""What the fields of a chat request are called here."""
Json = dict[str, Any]


def chat_request(fields: ResponsesRequest) -> ChatRequest:
    """The same request in the words of chat completions. Raises RequestError."""
    same = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")
    data: Json = {name: getattr(fields, name) for name in same}
    data |= {"messages": _conversation(fields), "max_tokens": fields.max_output_tokens}
    data["tool_choice"] = fields.tool_choice
    if isinstance(fields.tool_choice, dict):
        data["tool_choice"] = {"type": "function", "function": {"name": fields.tool_choice["name"]}}
    if fields.tools:
        data["tools"] = [_tool(tool) for tool in fields.tools]
    if fields.reasoning is not None and fields.reasoning.effort is not None:
        data["chat_template_kwargs"] = {"reasoning_effort": fields.reasoning.effort}
    if fields.text is not None and fields.text.format is not None:
        data["response_format"] = _format(fields.text.format)
    try:
        return checked(data, ChatRequest)
    except RequestError as error:
        raise in_own_words(error) from None


def in_own_words(error: RequestError) -> RequestError:
    """An error of the chat request, naming the field of the client's."""
    return renamed(error, _NAMES)


def _conversation(fields: ResponsesRequest) -> list[Json]:
    messages: list[Json] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    for item in fields.input:
        if item.type == "function_call_output":
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)})
        elif item.type == "message" and item.role == "user":
            messages.append({"role": "user", "content": _text(item.content)})
        elif item.type == "message" and item.role != "assistant":
            _add(_last(messages, "system"), "content", _text(item.content), between="\n\n")
        else:
            _take(_last(messages, "assistant"), item)
    return messages


def _last(messages: list[Json], role: str) -> Json:
    """The last message if it has this role, else a new one: what stands together is one message in a template."""
    if not messages or messages[-1]["role"] != role:
        messages.append({"role": role, "content": ""})
    return messages[-1]


def _take(message: Json, item: Item) -> None:
    """Add an item to the assistant's message."""
    if item.type == "message":
        _add(message, "content", _text(item.content), between="\n")
    elif item.type == "reasoning":
        _add(message, "reasoning_content", _text(item.content), between="\n")
    else:
        function = {"name": qualified(item.namespace, item.name or ""), "arguments": item.arguments}
        message.setdefault("tool_calls", []).append({"id": item.call_id, "function": function})


def _add(message: Json, field: str, text: str, *, between: str) -> None:
    if text:
        message[field] = between.join(filter(None, (message.get(field), text)))


def _text(parts: Iterable[TextPart] | None) -> str:
    return "".join(part.text for part in parts or ())


def _tool(tool: Function) -> Json:
    function = tool.model_dump(exclude={"type", "namespace"})
    return {"type": "function", "function": {**function, "name": qualified(tool.namespace, tool.name)}}


def _format(form: Form) -> Json:
    if form.type != "json_schema":
        return {"type": form.type}
    return {"type": "json_schema", "json_schema": {"name": form.name or "output", "schema": form.schema_}}
