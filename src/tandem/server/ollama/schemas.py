"""Schemas of Ollama's requests. Types are strict and unknown fields are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from tandem.json_types import JsonObject
from tandem.server.openai.messages import MAX_CALLS, MAX_FIELDS, MAX_MESSAGES, Strict, at_most


def _no_images(value: object) -> object:
    if value:
        raise PydanticCustomError("unsupported", "images are not supported: no model here sees; send text alone")
    return None


def _format(value: object) -> object:
    if value not in ("", "json") and not isinstance(value, dict):
        raise PydanticCustomError("format", "expected 'json' or a JSON schema")
    return value or None


Images = Annotated[None, BeforeValidator(_no_images)]


class CalledFunction(Strict):
    """Name and arguments of a tool call."""

    without_effect = frozenset({"index", "description"})
    name: str
    arguments: JsonObject = {}


class ToolCall(Strict):
    """A tool call in an assistant's message."""

    without_effect = frozenset({"type", "index"})
    id: str | None = None
    function: CalledFunction


class Turn(Strict):
    """Message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    images: Images = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaOptions(Strict):
    """Names of `options`; the chat or completion request that they become checks their values."""

    num_predict: object = None
    temperature: object = None
    top_k: object = None
    top_p: object = None
    min_p: object = None
    seed: object = None
    stop: object = None
    repeat_penalty: object = None
    presence_penalty: object = None
    frequency_penalty: object = None


class ModelRequest(Strict):
    """Body of POST /api/show and /api/pull, and of DELETE /api/delete."""

    without_effect = frozenset({"verbose", "insecure"})
    model: str | None = None
    name: str | None = None
    """Older name of `model`."""
    stream: bool | None = None


class OllamaEmbedRequest(Strict):
    """Body of POST /api/embed, and with `prompt` of POST /api/embeddings."""

    model: str
    input: Annotated[object, Field(json_schema_extra={"type": ["string", "array"]})] = None
    prompt: str | None = None
    dimensions: int | None = None


class OllamaRequest(Strict):
    """Fields shared by /api/chat and /api/generate."""

    model: str
    stream: bool | None = None
    """True by default, unlike OpenAI's."""
    options: Annotated[JsonObject | None, at_most(MAX_FIELDS)] = None
    format: Annotated[object, BeforeValidator(_format)] = None
    think: object = None
    """True, false, or an effort."""
    keep_alive: object = None


class OllamaChatRequest(OllamaRequest):
    """Body of POST /api/chat."""

    messages: Annotated[list[Turn], Field(max_length=MAX_MESSAGES, fail_fast=True)] = []
    tools: Annotated[list[JsonObject], Field(max_length=128, fail_fast=True)] | None = None


class OllamaGenerateRequest(OllamaRequest):
    """Body of POST /api/generate."""

    prompt: str = ""
    system: str | None = None
    raw: bool | None = None
    """Continue `prompt` as it stands, without the chat template."""
    images: Images = None
