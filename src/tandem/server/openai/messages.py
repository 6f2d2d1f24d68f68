"""Bodies of requests: the messages of a conversation, the calls in them, and the tools that may be called."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

NAMED_FORM = {"type": "function", "function": {"name": "..."}}
TOOL_CHOICE = {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object", "examples": [NAMED_FORM]}]}
"""What `tool_choice` looks like in a request."""


class Strict(BaseModel):
    """Base: no conversions, no extra fields, no NaN or infinity."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


def only_type(kind: str, data: Any) -> Any:
    """A tool as it came. Raises PydanticCustomError when it is of another type: its other fields are others as well."""
    given = data.get("type", kind) if isinstance(data, dict) else kind
    if isinstance(given, str) and given != kind:
        raise PydanticCustomError("unsupported", "tools of type '{type}' are not supported", {"type": given[:40]})
    return data


class CalledFunction(Strict):
    """Name and arguments of a tool call."""

    name: str
    arguments: str = ""
    """JSON, as the model wrote it."""


class ToolCall(Strict):
    """A tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None

    def as_template_input(self) -> dict[str, Any]:
        """As chat templates expect it: with arguments as an object where they are one."""
        try:
            arguments: Any = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            arguments = self.function.arguments
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _flatten(cls, data: Any) -> Any:
        """Join text parts, and drop what OpenAI's answers carry as empty when a client sends them back."""
        if not isinstance(data, dict):
            return data
        unsupported = {"refusal", "annotations", "audio", "function_call"}
        empty = {*unsupported, "tool_calls", "tool_call_id"}
        data = {key: value for key, value in data.items() if key not in empty or value not in (None, [])}
        for key in sorted(unsupported & data.keys()):
            raise PydanticCustomError("unsupported", "'{field}' in a message is not supported", {"field": key})
        if isinstance(data.get("content"), list):
            parts = enumerate(data["content"])
            data["content"] = "".join(_part_text(index, part) for index, part in parts)
        if data.get("role") == "function":
            raise PydanticCustomError("unsupported", "role '{role}' is not supported", {"role": data["role"]})
        return data

    @model_validator(mode="after")
    def _fits_role(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise PydanticCustomError("missing_content", "a {role} message needs 'content'", {"role": self.role})
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) is not None and self.role != role:
                context = {"field": field, "role": role, "mine": self.role}
                raise PydanticCustomError("unsupported", "'{field}' belongs to role '{role}', not '{mine}'", context)
        if self.role == "tool" and self.tool_call_id is None:
            raise PydanticCustomError("missing_id", "a tool message needs the 'tool_call_id' that it answers")
        return self

    def as_template_input(self) -> dict[str, Any]:
        """The message as chat templates expect it. OpenAI's `developer` is what everyone else calls `system`."""
        role = "system" if self.role == "developer" else self.role
        extras = {"name": self.name, "reasoning_content": self.reasoning_content, "tool_call_id": self.tool_call_id}
        message: dict[str, Any] = {"role": role, "content": self.content or ""}
        message |= {name: value for name, value in extras.items() if value is not None}
        if self.tool_calls:
            message["tool_calls"] = [call.as_template_input() for call in self.tool_calls]
        return message


def _part_text(index: int, part: Any) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise PydanticCustomError(
            "content_part", "content part {index} is not an object with a 'type'", {"index": index}
        )
    if part["type"] != "text":
        context = {"index": index, "type": part["type"][:40]}
        raise PydanticCustomError("unsupported", "content part {index}: type '{type}' is not supported", context)
    if set(part) != {"type", "text"} or not isinstance(part["text"], str):
        raise PydanticCustomError("content_part", "content part {index} needs a string 'text' alone", {"index": index})
    return part["text"]


class FunctionSpec(Strict):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; without one there are none."""
    strict: bool | None = None
    """Arguments fit the schema whenever a call is forced; otherwise the model is free."""


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: FunctionSpec


class ToolChoice(Strict):
    """OpenAI's `tool_choice` in one form."""

    mode: Literal["auto", "none", "required", "named"]
    name: str | None = None


Tools = Annotated[list[Tool], Field(max_length=128)]
