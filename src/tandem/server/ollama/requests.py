"""Schemas of Ollama's requests, and their translation to chat and completion requests. Pure."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import BeforeValidator, Field

from tandem.errors import invalid
from tandem.json_types import JsonObject
from tandem.server.body_validation import checked
from tandem.server.fields import GENERATING, Unknown, unknown_field
from tandem.server.openai.messages import MAX_CALLS, MAX_FIELDS, MAX_MESSAGES, MAX_PARTS, Strict, at_most, wrong
from tandem.server.openai.schemas import ChatRequest, CompletionRequest

_SAME = ("temperature", "top_k", "top_p", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty")
OPTIONS = {"num_predict": "max_tokens", "repeat_penalty": "repetition_penalty", **{name: name for name in _SAME}}
"""Our names for the `options` that have an effect."""
NAMES = {ours: f"options.{theirs}" for theirs, ours in OPTIONS.items()} | {
    **dict.fromkeys(("response_format", "response_format.json_schema.schema"), "format"),
    **dict.fromkeys(("enable_thinking", "reasoning_effort"), "think"),
}
"""Field names of Ollama's API, by field name of a chat request."""


def _format(value: object) -> object:
    if value not in ("", "json") and not isinstance(value, dict):
        raise wrong("format", "expected 'json' or a JSON schema")
    return value


Images = Annotated[list[str], Field(max_length=MAX_PARTS, fail_fast=True)]
"""Pictures in base64."""


class Turn(Strict):
    """Message of a conversation."""

    role: str
    content: str = ""
    thinking: str | None = None
    images: Images = []
    tool_calls: Annotated[list[JsonObject], Field(max_length=MAX_CALLS, fail_fast=True)] = []
    tool_name: str | None = None
    tool_call_id: str | None = None


class ModelRequest(Strict):
    """Body of POST /api/show and /api/pull, and of DELETE /api/delete."""

    model: str = ""
    name: str = ""
    """Older name of `model`."""
    stream: bool = True


class OllamaEmbedRequest(Strict):
    """Body of POST /api/embed (with `input`) and /api/embeddings (with `prompt`)."""

    model: str
    input: object = None
    prompt: str | None = None
    dimensions: int | None = None


class OllamaRequest(Strict):
    """Fields shared by /api/chat and /api/generate."""

    model: str
    stream: bool = True
    options: Annotated[JsonObject, at_most(MAX_FIELDS)] = {}
    format: Annotated[object, BeforeValidator(_format)] = None
    think: object = None
    """True, false, or an effort."""
    keep_alive: object = None


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat."""

    messages: Annotated[list[Turn], Field(max_length=MAX_MESSAGES, fail_fast=True)] = []
    tools: Annotated[list[JsonObject], Field(max_length=128, fail_fast=True)] = []


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate."""

    prompt: str = ""
    suffix: str = ""
    system: str = ""
    raw: bool = False
    """Continue `prompt` as it stands, without the chat template."""
    images: Images = []


def without_effect(fields: OllamaRequest, unknown: Unknown) -> list[str]:
    """Return the names of options without effect. `unknown`: value of --unknown-fields. Raises RequestError."""
    left_out = [name for name in fields.options if name not in OPTIONS]
    strangers = [name for name in left_out if name not in GENERATING]
    if strangers and unknown == "refuse":
        raise unknown_field(f"options.{strangers[0]}", OPTIONS)
    return [f"options.{name}" for name in left_out]


def translated_request(fields: OllamaRequest) -> ChatRequest | CompletionRequest:
    """Return the equivalent chat request, or of a raw prompt the completion request. Raises RequestError."""
    data: JsonObject = {OPTIONS[name]: value for name, value in fields.options.items() if name in OPTIONS}
    if data.get("max_tokens") == -2:  # until the context is full
        data["max_tokens"] = -1
    if fields.format:
        schema = {"type": "json_schema", "json_schema": {"name": "format", "schema": fields.format}}
        data["response_format"] = {"type": "json_object"} if fields.format == "json" else schema
    data["stream"] = fields.stream
    if isinstance(fields, OllamaGenerateRequest) and fields.suffix:
        raise invalid("suffix", "'suffix' is not there; with 'raw', put the model's own fill-in-the-middle tokens into 'prompt'.")
    if isinstance(fields, OllamaGenerateRequest) and fields.raw:
        if fields.images:
            raise invalid("images", "'images' need the chat template, which 'raw' leaves out; send one of the two.")
        return checked(data | {"prompt": fields.prompt}, CompletionRequest)
    data["enable_thinking" if isinstance(fields.think, bool) else "reasoning_effort"] = fields.think
    if isinstance(fields, OllamaGenerateRequest):
        said: tuple[tuple[str, str, list[str]], ...] = (("system", fields.system, []), ("user", fields.prompt, fields.images))
        data["messages"] = [{"role": role, "content": _parts(text, images)} for role, text, images in said if text]
    elif isinstance(fields, OllamaChatRequest):
        last = fields.messages[-1]
        data["continue_final_message"] = last.role == "assistant" and bool(last.content) and not last.tool_calls
        data |= {"messages": _messages(fields.messages), "tools": fields.tools or None}
    return checked(data, ChatRequest)


def _parts(text: str, images: list[str]) -> str | list[JsonObject]:
    """Return the content of a chat message; pictures come before the text, as Ollama puts them."""
    urls = [image if image.startswith("data:") else f"data:image;base64,{image}" for image in images]
    pictures = [{"type": "image_url", "image_url": url} for url in urls]
    return [*pictures, {"type": "text", "text": text}] if pictures else text


def _messages(turns: list[Turn]) -> list[JsonObject]:
    """Return chat messages. A tool's result belongs to the first call without one that has its `tool_name`, if any."""
    messages: list[JsonObject] = []
    waiting: list[tuple[object, object]] = []
    for turn in turns:
        content = _parts(turn.content, turn.images)
        message: JsonObject = {"role": turn.role, "content": content, "reasoning_content": turn.thinking}
        if turn.tool_calls:
            calls = [_call(call, f"call_{len(messages)}_{number}") for number, call in enumerate(turn.tool_calls)]
            waiting = [(call["id"], call["function"]["name"]) for call in calls]
            message["tool_calls"] = calls
        if turn.role == "tool":
            call = next((call for call in waiting if turn.tool_name in (None, call[1])), ("call", ""))
            waiting = [other for other in waiting if other != call]
            message |= {"name": turn.tool_name, "tool_call_id": turn.tool_call_id or call[0]}
        messages.append(message)
    return messages


def _call(call: JsonObject, call_id: str) -> JsonObject:
    """Return a tool call with its arguments as text. `call_id`: its id if it has none."""
    function = call.get("function")
    called: JsonObject = function if isinstance(function, dict) else {}
    arguments = json.dumps(called.get("arguments", {}), ensure_ascii=False)
    return {"id": call.get("id") or call_id, "function": {"name": called.get("name"), "arguments": arguments}}
