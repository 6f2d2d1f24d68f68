"""Translate requests of Anthropic's API to chat requests. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import groupby

from tandem.server.anthropic.schemas import Block, ContentBlock, CountRequest, MessagesRequest, OutputConfig, TextBlock, Tool
from tandem.server.body_validation import checked
from tandem.server.openai.schemas import ChatRequest

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
NAMES = {
    "stop": "stop_sequences",
    "response_format.json_schema.schema": "output_config.format.schema",
    "enable_thinking": "thinking",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
}
"""Field names of Anthropic's API, by field name of a chat request."""
Json = dict[str, object]


def chat_request(fields: CountRequest) -> ChatRequest:
    """Return the equivalent chat request. Raises RequestError."""
    data: Json = {"model": fields.model, "messages": _conversation(fields)}
    if tools := [_tool(tool) for tool in fields.tools or () if not tool.hosted]:
        data["tools"] = tools
    if fields.messages[-1].role == "assistant":
        data["continue_final_message"] = True
    if (choice := fields.tool_choice) is not None:
        data["tool_choice"] = _CHOICES.get(choice.type, {"type": "function", "function": {"name": choice.name}})
        data["parallel_tool_calls"] = not choice.disable_parallel_tool_use
    if fields.thinking is not None:
        data["enable_thinking"] = fields.thinking.type != "disabled"
        data["thinking_token_budget"] = fields.thinking.budget_tokens
    output = fields.output_config or OutputConfig()
    if output.effort is not None:
        data["reasoning_effort"] = output.effort
    if (form := output.format or fields.output_format) is not None:
        data["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": form.schema_}}
    if isinstance(fields, MessagesRequest):
        same = {name: getattr(fields, name) for name in ("max_tokens", "stream", "temperature", "top_p")}
        data |= same | {"top_k": fields.top_k or None, "stop": fields.stop_sequences}
    return checked(data, ChatRequest)


def _conversation(fields: CountRequest) -> list[Json]:
    messages: list[Json] = []
    if fields.system:
        messages.append({"role": "system", "content": _text(fields.system)})
    for role, turns in groupby(fields.messages, key=lambda turn: turn.role):
        blocks = [block for turn in turns for block in turn.content]
        if role == "assistant":
            messages.append(_assistant(blocks))
        else:
            messages += _others(role, blocks)
    return messages


def _assistant(blocks: list[Block]) -> Json:
    message: Json = {"role": "assistant", "content": _text(block for block in blocks if block.type == "text")}
    calls = [
        {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}}
        for block in blocks
        if block.type == "tool_use"
    ]
    if calls:
        message["tool_calls"] = calls
    if thinking := "".join(block.thinking or "" for block in blocks):
        message["reasoning_content"] = thinking
    return message


def _others(role: str, blocks: list[Block]) -> list[Json]:
    """Return a user's or system's blocks as chat messages; each tool result becomes a `tool` message."""
    messages: list[Json] = []
    for result, group in groupby(blocks, key=lambda block: block.type == "tool_result"):
        if not result:
            messages.append({"role": role, "content": _parts(group)})
            continue
        for block in group:
            parts = [{"type": "text", "text": "Error: "}] if block.is_error else []
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": parts + _parts(block.content or ())})
    return messages or [{"role": role, "content": ""}]


def _parts(blocks: Iterable[ContentBlock]) -> list[Json]:
    """Return content parts: a text for adjacent text blocks, and each picture by its URL, or its bytes as a data URI."""
    parts: list[Json] = []
    for source, group in groupby(blocks, key=lambda block: block.source):
        if source is None:
            parts.append({"type": "text", "text": _text(group)})
        else:
            url = source.url or f"data:{source.media_type};base64,{source.data}"
            parts += [{"type": "image_url", "image_url": url} for _ in group]
    return parts


def _text(blocks: Iterable[ContentBlock | TextBlock]) -> str:
    return "\n".join(block.text or "" for block in blocks)


def _tool(tool: Tool) -> Json:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}
