"""Translate requests of Ollama's API to chat and completion requests. Pure."""

from __future__ import annotations

import json

from tandem.json_types import JsonObject
from tandem.server.body_validation import checked, in_words
from tandem.server.fields import RENAMED, Unknown, without_strangers
from tandem.server.ollama.schemas import OllamaChatRequest, OllamaGenerateRequest, OllamaOptions, OllamaRequest, Turn
from tandem.server.openai.schemas import ChatRequest, CompletionRequest

NAMES = {
    **{RENAMED.get(name, name): f"options.{name}" for name in OllamaOptions.model_fields},
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    "enable_thinking": "think",
    "reasoning_effort": "think",
}
"""Field names of Ollama's API, by field name of a chat request."""


def sampling_of(fields: OllamaRequest, unknown: Unknown) -> tuple[JsonObject, list[str]]:
    """Return stream, format and `options` as fields of SamplingFields, and the names of options without effect.

    `unknown`: value of --unknown-fields. Raises RequestError.
    """
    options = dict(fields.options or {})
    with in_words({name: f"options.{name}" for name in options}):
        kept, left_out, _ = without_strangers(options, OllamaOptions, unknown)
    data: JsonObject = {RENAMED.get(name, name): value for name, value in kept.items()}
    if data.get("max_tokens") == -2:  # until the context is full
        data["max_tokens"] = -1
    if fields.format is not None:
        schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": fields.format}}
        data["response_format"] = {"type": "json_object"} if fields.format == "json" else schema
    return {**data, "stream": fields.stream is not False}, [f"options.{name}" for name in left_out]


def chat_request(fields: OllamaChatRequest | OllamaGenerateRequest, sampling: JsonObject) -> ChatRequest:
    """Return the equivalent chat request. Raises RequestError."""
    data = dict(sampling)
    if fields.think is not None:
        data["enable_thinking" if isinstance(fields.think, bool) else "reasoning_effort"] = fields.think
    if isinstance(fields, OllamaChatRequest):
        data |= {"messages": _messages(fields.messages), "tools": fields.tools or None}
        last = fields.messages[-1]
        if last.role == "assistant" and last.content and not last.tool_calls:
            data["continue_final_message"] = True
    else:
        system = [{"role": "system", "content": fields.system}] if fields.system else []
        data["messages"] = [*system, {"role": "user", "content": fields.prompt}]
    return checked(data, ChatRequest)


def completion_request(fields: OllamaGenerateRequest, sampling: JsonObject) -> CompletionRequest:
    """Return the equivalent completion request of a raw prompt. Raises RequestError."""
    return checked({**sampling, "prompt": fields.prompt}, CompletionRequest)


def _messages(turns: list[Turn]) -> list[JsonObject]:
    """Return chat messages. A tool's result belongs to the first call without one that has its `tool_name`, if any."""
    messages: list[JsonObject] = []
    waiting: list[tuple[str, str]] = []
    for turn in turns:
        message: JsonObject = {"role": turn.role, "content": turn.content, "reasoning_content": turn.thinking}
        if turn.tool_calls:
            named = [(call.id or f"call_{len(messages)}_{n}", call.function) for n, call in enumerate(turn.tool_calls)]
            waiting = [(call_id, function.name) for call_id, function in named]
            message["tool_calls"] = [
                {"id": call_id, "function": {"name": function.name, "arguments": json.dumps(function.arguments)}}
                for call_id, function in named
            ]
        if turn.role == "tool":
            call = next((call for call in waiting if turn.tool_name in (None, call[1])), None)
            if call is not None and turn.tool_call_id is None:
                waiting.remove(call)
            message |= {"name": turn.tool_name, "tool_call_id": turn.tool_call_id or (call[0] if call else "call")}
        messages.append(message)
    return messages
