"""Schemas of Anthropic's requests. Types are strict and unknown fields are errors."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from tandem.json_types import JsonObject
from tandem.protocol.ranges import RANGES
from tandem.server.openai.messages import MAX_MESSAGES, MAX_PARTS, ClientTool, Strict, Tagged, wrong

_ROLES = {
    "image": "user",
    "tool_result": "user",
    "tool_use": "assistant",
    "thinking": "assistant",
    "redacted_thinking": "assistant",
}
SCHEMA = {"type": "object"}


class Marked(Strict):
    """Base of objects with `cache_control`, which is ignored: prefixes are always cached."""

    cache_control: JsonObject | None = None


def as_blocks(value: object) -> object:
    """Convert a plain string to a list of one text block; return anything else unchanged."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextBlock(Marked):
    """Text block, where only text is allowed."""

    type: Literal["text"]
    text: str
    citations: None = None


TextBlocks = Annotated[list[TextBlock], Field(max_length=MAX_PARTS, fail_fast=True)]


class PictureSource(Tagged):
    """Source of a picture."""

    noun = "source"
    needs = {"base64": {"media_type", "data"}, "url": {"url"}}
    takes = {}
    always = {"type"}
    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None


class ContentBlock(Marked, Tagged):
    """Base of content blocks, each of which may be a text or a picture."""

    noun = "block"
    needs = {"text": {"text"}, "image": {"source"}}
    takes = {"text": {"citations"}}
    always = {"type", "cache_control"}
    text: str | None = None
    citations: None = None
    source: PictureSource | None = None


class ResultBlock(ContentBlock):
    """Content block of a tool's result."""

    type: Literal["text", "image"]


class Block(ContentBlock):
    """Content block of a message."""

    needs = {
        **ContentBlock.needs,
        "tool_use": {"id", "name", "input"},
        "tool_result": {"tool_use_id"},
        "thinking": {"thinking"},
        "redacted_thinking": {"data"},
    }
    takes = {
        **ContentBlock.takes,
        "tool_use": {"caller", "toolset_name"},
        "tool_result": {"content", "is_error", "toolset_name"},
        "thinking": {"signature"},
    }
    type: Literal["text", "image", "tool_use", "tool_result", "thinking", "redacted_thinking"]
    id: str | None = None
    name: str | None = None
    input: JsonObject | None = None
    caller: JsonObject | None = None
    toolset_name: None = None
    tool_use_id: str | None = None
    content: Annotated[list[ResultBlock], Field(max_length=MAX_PARTS, fail_fast=True)] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    """Accepted but not checked."""
    data: str | None = None

    _texts = field_validator("content", mode="before")(as_blocks)


class Turn(Strict):
    """Message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Annotated[list[Block], Field(max_length=MAX_PARTS, fail_fast=True)]

    _texts = field_validator("content", mode="before")(as_blocks)

    @model_validator(mode="after")
    def _fits_role(self) -> Turn:
        for block in self.content:
            if self.role != _ROLES.get(block.type, self.role):
                raise wrong("unsupported", f"a {block.type} block has no place in a {self.role} message")
        return self


class Tool(Marked, ClientTool):
    """Tool that runs at the client, or an ignored server-side one (`hosted`)."""

    own_type = "custom"
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    input_schema: Annotated[JsonObject, Field(json_schema_extra=SCHEMA)]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    """Accepted but ignored: arguments of forced calls always fit the schema."""
    eager_input_streaming: bool | None = None
    """Accepted but ignored: arguments always stream without buffering."""
    input_examples: None = None
    defer_loading: Literal[False] | None = None
    allowed_callers: Annotated[list[Literal["direct"]], Field(max_length=16, fail_fast=True)] | None = None

    @classmethod
    def placeholder(cls, kind: str) -> JsonObject | None:
        """Return valid fields in place of those of a hosted tool of type `kind`; None for any other type."""
        return {"name": kind, "input_schema": {}} if re.fullmatch(r"[a-z_]{1,40}_20\d{6}", kind) else None


class Choice(Strict):
    """Tool choice."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> Choice:
        if (self.type == "tool") != (self.name is not None):
            raise wrong("one_of", "'name' belongs to the type 'tool', and only to it")
        return self


class Thinking(Strict):
    """Thinking switch and budget."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most thinking tokens, included in `max_tokens`. Ignored for models that do not think, as agents always send it."""
    display: Literal["summarized"] | None = None
    """Accepted but ignored: thinking is always returned in full."""


class Format(Strict):
    """Response format."""

    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    """Response format and reasoning effort."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: Format | None = None


class CountRequest(Strict):
    """Body of POST /v1/messages/count_tokens."""

    model: str
    messages: Annotated[list[Turn], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: TextBlocks | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: Format | None = None
    """Older name of `output_config.format`."""

    _texts = field_validator("system", mode="before")(as_blocks)

    @model_validator(mode="after")
    def _one_form(self) -> CountRequest:
        if self.output_format is not None and self.output_config is not None and self.output_config.format is not None:
            raise wrong("one_of", "'output_format' is the older name of 'output_config.format'; give one of them")
        return self


class MessagesRequest(CountRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1)]
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] | None = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(**RANGES["top_p"].bounds)] | None = None
    top_k: Annotated[int, Field(**RANGES["top_k"].bounds)] | None = None
