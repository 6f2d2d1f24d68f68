"""Schema of POST /v1/responses. Types are strict and unknown fields are errors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, WithJsonSchema, field_validator, model_validator

from tandem.json_types import JsonObject
from tandem.protocol.pictures import Detail
from tandem.protocol.ranges import RANGES
from tandem.server.openai.messages import MAX_MESSAGES, MAX_PARTS, ClientTool, FunctionSpec, Strict, Tagged, at_most, wrong
from tandem.server.openai.schemas import CacheKey, ReasoningEffort, Retention, StreamOptions

MAX_METADATA = 64
NAMED_FORM = {"type": "function", "name": "..."}
CHOICE = {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object", "examples": [NAMED_FORM]}]}


class Part(Tagged):
    """Text or picture of an item."""

    noun = "content part"
    needs = {
        **dict.fromkeys(("input_text", "output_text", "reasoning_text", "summary_text"), {"text"}),
        "input_image": {"image_url"},
    }
    takes = {"input_image": {"detail"}}
    always = {"type", "annotations", "logprobs"}
    type: Literal["input_text", "output_text", "reasoning_text", "summary_text", "input_image"]
    text: str | None = None
    annotations: list[object] | None = None
    logprobs: list[object] | None = None
    image_url: str | None = None
    detail: Detail | None = None


def as_parts(value: object) -> object:
    """Convert a plain string to a list of one text part; return anything else unchanged."""
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


def implied_type(item: JsonObject) -> object:
    """Return the type of an item; without one it is a message or, without a role too, a reference."""
    return item.get("type") or ("message" if "role" in item or "id" not in item else "item_reference")


Parts = Annotated[list[Part], Field(max_length=MAX_PARTS, fail_fast=True)]


class Item(Tagged):
    """Item of the conversation."""

    noun = "item"
    needs = {
        "message": {"role", "content"},
        "function_call": {"call_id", "name", "arguments"},
        "function_call_output": {"call_id", "output"},
        "reasoning": set(),
        "item_reference": {"id"},
    }
    takes = {"message": {"phase"}, "function_call": {"namespace"}, "reasoning": {"content", "summary", "encrypted_content"}}
    always = {"type", "id", "status"}
    type: Literal["message", "function_call", "function_call_output", "reasoning", "item_reference"]
    id: str | None = None
    status: Literal["in_progress", "completed", "incomplete"] | None = None
    phase: Literal["commentary", "final_answer"] | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Parts | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    output: Parts | None = None
    summary: Parts | None = None
    encrypted_content: str | None = None
    """Accepted but ignored: only the server that made it can decrypt it."""

    _texts = field_validator("content", mode="before")(as_parts)
    _result = field_validator("output", mode="before")(as_parts)

    @model_validator(mode="before")
    @classmethod
    def _implied_type(cls, data: object) -> object:
        return {**data, "type": implied_type(data)} if isinstance(data, dict) and data.get("type") is None else data

    @model_validator(mode="after")
    def _shown_by_users(self) -> Item:
        """Refuse pictures besides those of the user and of functions."""
        others = [*(self.summary or ()), *((self.content or ()) if self.role != "user" else ())]
        if any(part.type == "input_image" for part in others):
            raise wrong("unsupported", "an input_image belongs in a message of the user or in the output of a function")
        return self


HOSTED = frozenset(
    {
        "web_search",
        "web_search_preview",
        "file_search",
        "code_interpreter",
        "image_generation",
        "local_shell",
        "shell",
        "mcp",
        "tool_search",
        "computer",
        "computer_use_preview",
        "apply_patch",
        "custom",
    }
)
"""Types of tools that OpenAI's servers run, or that only OpenAI supports."""


class Function(FunctionSpec, ClientTool):
    """Function that the model may call; flat, without chat's `function` wrapper."""

    own_type = "function"
    type: Literal["function"]
    namespace: str | None = None
    """Namespace that contains the function, if any."""

    @classmethod
    def placeholder(cls, kind: str) -> JsonObject | None:
        """Return valid fields in place of those of a hosted tool of type `kind`; None for any other type."""
        return {"type": "function", "name": kind} if kind in HOSTED else None


def qualified(namespace: str | None, name: str) -> str:
    """Return the name of a function for the model: `namespace.name`, or `name`."""
    return f"{namespace}.{name}" if namespace else name


def flattened(tools: object) -> object:
    """Return the list of tools with each namespace replaced by its functions, which get a `namespace` field."""
    if not isinstance(tools, list):
        return tools
    flat: list[object] = []
    for tool in tools:
        inner = tool.get("tools") if isinstance(tool, dict) and tool.get("type") == "namespace" else None
        if isinstance(inner, list) and all(isinstance(one, dict) for one in inner):
            flat += [{**one, "namespace": tool.get("name")} for one in inner]
        else:
            flat.append(tool)
    return flat


class Form(Strict):
    """Response format."""

    type: Literal["text", "json_object", "json_schema"]
    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    schema_: JsonObject | None = Field(None, alias="schema")
    description: str | None = None
    strict: bool | None = None
    """Accepted but ignored: the schema is always enforced."""

    @model_validator(mode="after")
    def _belongs(self) -> Form:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise wrong("one_of", "'schema' belongs to the type 'json_schema', and only to it")
        return self


class Text(Strict):
    """Response format and verbosity."""

    format: Form | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """Accepted but ignored: chat templates have no such setting."""


Included = Literal[
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "message.input_image.image_url",
]


class ResponsesRequest(Strict):
    """Body of POST /v1/responses."""

    input: Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(**RANGES["temperature"].bounds)] | None = None
    top_p: Annotated[float, Field(**RANGES["top_p"].bounds)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Function], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Annotated[object, WithJsonSchema(CHOICE)] | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: ReasoningEffort | None = None
    metadata: Annotated[dict[str, str] | None, at_most(MAX_METADATA)] = None
    include: Annotated[list[Included], Field(max_length=16, fail_fast=True)] | None = None
    """Accepted but ignored, as clients always send it: there is no encrypted reasoning and no server-side tool."""
    previous_response_id: str | None = None
    prompt_cache_key: CacheKey | None = None
    prompt_cache_retention: Retention | None = None
    store: bool | None = None
    background: bool | None = None

    _flat = field_validator("tools", mode="before")(flattened)

    @property
    def functions(self) -> list[Function]:
        """Tools that run at the client."""
        return [tool for tool in self.tools or () if not tool.hosted]

    @field_validator("input", mode="before")
    @classmethod
    def _items(cls, value: object) -> object:
        return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value

    @field_validator("tool_choice")
    @classmethod
    def _one_form(cls, value: object) -> object:
        if value is None or value in ("auto", "none", "required"):
            return value
        if (
            isinstance(value, dict)
            and set(value) == {"type", "name"}
            and value["type"] == "function"
            and isinstance(value["name"], str)
        ):
            return value
        raise wrong("tool_choice", f"expected 'auto', 'none', 'required' or {NAMED_FORM}")
