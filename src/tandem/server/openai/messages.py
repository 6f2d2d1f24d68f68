"""Schemas of messages, tool calls and tools in request bodies."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from tandem.json_types import JsonObject
from tandem.protocol.pictures import Detail

NAMED_FORM = {"type": "function", "function": {"name": "..."}}
TOOL_CHOICE = {"anyOf": [{"enum": ["auto", "none", "required"]}, {"type": "object", "examples": [NAMED_FORM]}]}
"""JSON schema of `tool_choice`."""


MAX_FIELDS = 64
"""Most fields of one object, as pydantic reports each unknown one as an error."""
MAX_MESSAGES = 8192
MAX_PARTS = 4096
"""Most content parts of one message."""
MAX_CALLS = 1024
"""Most tool calls in one message."""


def wrong(kind: str, message: str) -> PydanticCustomError:
    """Return a validation error; those of the kind `unsupported` get that code."""
    return PydanticCustomError(kind, "{message}", {"message": message})


class Strict(BaseModel):
    """Base of schemas: no type conversions, no unknown fields, no NaN or infinity; null counts as absent."""

    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Further fields that are accepted and ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, data: object) -> object:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise wrong("too_many_fields", f"at most {MAX_FIELDS} fields, not {len(data)}")
        if isinstance(data, dict) and (None in data.values() or not cls.without_effect.isdisjoint(data)):
            needed = _required(cls)
            return {
                name: value for name, value in data.items() if name in needed or not (value is None or name in cls.without_effect)
            }
        return data


class Tagged(Strict):
    """Base of objects whose `type` determines the required and allowed fields."""

    noun: ClassVar[str]
    """Name of the object in error messages."""
    needs: ClassVar[Mapping[str, set[str]]]
    """Required fields, by type."""
    takes: ClassVar[Mapping[str, set[str]]]
    """Optional fields, by type."""
    always: ClassVar[set[str]]
    """Optional fields of all types."""

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: object) -> object:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in cls.needs:
            raise wrong("unsupported", f"{cls.noun}s of type '{kind[:40]}' are not supported")
        return data

    @model_validator(mode="after")
    def _fits_type(self) -> Self:
        kind: str = getattr(self, "type")  # noqa: B009 - a field of each subclass
        present = {name for name in self.model_fields_set if getattr(self, name) is not None}
        if missing := self.needs[kind] - present:
            raise wrong("missing_field", f"a {kind} {self.noun} needs '{min(missing)}'")
        if extra := present - self.needs[kind] - self.takes.get(kind, set()) - self.always:
            raise wrong("unsupported", f"'{min(extra)}' does not belong to a {kind} {self.noun}")
        return self


@lru_cache(maxsize=256)
def _required(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items() if field.is_required())


def at_most(limit: int) -> BeforeValidator:
    """Return a validator that limits the entries of an object with free keys, as each could be an error."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise wrong("too_many_entries", f"at most {limit} entries, not {len(value)}")
        return value

    return BeforeValidator(check)


def only_type(kind: str, data: object) -> object:
    """Return a tool unchanged. Raises PydanticCustomError for another `type`, before errors about its other fields."""
    given = data.get("type", kind) if isinstance(data, dict) else kind
    if isinstance(given, str) and given != kind:
        raise wrong("unsupported", f"tools of type '{given[:40]}' are not supported")
    return data


class ClientTool(Strict):
    """Tool that runs at the client, or one that only the API's vendor runs (`hosted`), which is ignored here."""

    own_type: ClassVar[str]
    """`type` of tools that run at the client."""
    _hosted: bool = PrivateAttr(default=False)

    @property
    def hosted(self) -> bool:
        """True for a tool that only the API's vendor runs, such as web search."""
        return self._hosted

    @classmethod
    def placeholder(cls, kind: str) -> JsonObject | None:
        """Return valid fields in place of those of a hosted tool of type `kind`; None for any other type."""
        raise NotImplementedError

    @model_validator(mode="wrap")
    @classmethod
    def _kind(cls, data: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        kind = data.get("type") if isinstance(data, dict) else None
        instead = cls.placeholder(kind) if isinstance(kind, str) else None
        tool = validate(only_type(cls.own_type, data) if instead is None else instead)
        tool._hosted = instead is not None
        return tool


class CalledFunction(Strict):
    """Name and arguments of a tool call."""

    name: str
    arguments: str = ""
    """JSON text, as the model wrote it; maybe invalid."""


class ToolCall(Strict):
    """A tool call in an assistant's message."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None


class Image(Strict):
    """Value of `image_url` in a content part."""

    url: str
    detail: Detail = "auto"


class GivenPicture(NamedTuple):
    """Picture of a message, as the client gave it."""

    at: int
    """Number of characters of the message's text before it."""
    url: str
    low: bool
    """True for `detail` "low"."""


class Message(Strict):
    """One message of a conversation."""

    without_effect = frozenset({"cache_control", "provider_specific_fields", "reasoning_details", "thinking_blocks"})
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_CALLS, fail_fast=True)] | None = None
    tool_call_id: str | None = None
    _pictures: tuple[GivenPicture, ...] = PrivateAttr(default=())

    @property
    def pictures(self) -> tuple[GivenPicture, ...]:
        """Pictures in the order of the content."""
        return self._pictures

    @model_validator(mode="wrap")
    @classmethod
    def _flatten(cls, data: object, validate: ModelWrapValidatorHandler[Self]) -> Self:
        """Join text parts, note pictures, and drop the empty fields of OpenAI's answers that clients send back."""
        if not isinstance(data, dict):
            return validate(data)
        if data.get("reasoning_content") is None and isinstance(data.get("reasoning"), str):
            data = {**data, "reasoning_content": data["reasoning"]}  # vLLM's and OpenRouter's name
        unsupported = {"refusal", "annotations", "audio", "function_call"}
        empty = {*unsupported, "tool_calls", "tool_call_id"}
        data = {key: value for key, value in data.items() if key not in empty or value not in (None, [])}
        if isinstance(data.get("reasoning"), str):
            del data["reasoning"]
        for key in sorted(unsupported & data.keys()):
            raise wrong("unsupported", f"'{key}' in a message is not supported")
        if data.get("role") == "function":
            raise wrong("unsupported", "role 'function' is not supported")
        pictures: list[GivenPicture] = []
        if isinstance(data.get("content"), list):
            if len(data["content"]) > MAX_PARTS:
                raise wrong("too_many_parts", f"at most {MAX_PARTS} content parts, not {len(data['content'])}")
            sees, texts, size = data.get("role") in ("user", "tool"), [], 0
            for index, part in enumerate(data["content"]):
                if sees and isinstance(part, dict) and part.get("type") == "image_url":
                    image = _image(index, part)
                    pictures.append(GivenPicture(size, image.url, image.detail == "low"))
                else:
                    texts.append(_part_text(index, part))
                    size += len(texts[-1])
            data["content"] = "".join(texts)
        message = validate(data)
        message._pictures = tuple(pictures)
        return message

    @model_validator(mode="after")
    def _fits_role(self) -> Message:
        if self.content is None and self.role != "assistant":
            raise wrong("missing_content", f"a {self.role} message needs 'content'")
        for field, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, field) is not None and self.role != role:
                raise wrong("unsupported", f"'{field}' belongs to role '{role}', not '{self.role}'")
        if self.role == "tool" and self.tool_call_id is None:
            raise wrong("missing_id", "a tool message needs the 'tool_call_id' that it answers")
        return self


def _image(index: int, part: JsonObject) -> Image:
    """Return the picture of a content part: its `image_url` is an object, or the URL alone."""
    given = part.get("image_url")
    try:
        image = Image.model_validate({"url": given} if isinstance(given, str) else given)
    except ValidationError as error:
        detail = error.errors(include_url=False)[0]
        where = ".".join(["image_url", *map(str, detail["loc"])])
        given = f" is {detail['input']!r:.60}" if detail["type"] == "literal_error" else ""
        raise wrong("content_part", f"content part {index}: '{where}'{given}: {detail['msg'][:200]}") from None
    if strangers := {name for name, value in part.items() if value is not None} - {"type", "image_url", "cache_control"}:
        raise wrong("content_part", f"content part {index}: '{min(strangers)[:40]}' does not belong beside 'image_url'")
    return image


def _part_text(index: int, part: object) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise wrong("content_part", f"content part {index} is not an object with a 'type'")
    if part["type"] != "text":
        why = f"type '{part['type'][:40]}' is not supported; send 'text', or 'image_url' in messages of users and tools"
        raise wrong("unsupported", f"content part {index}: {why}")
    said = {name for name, value in part.items() if value is not None} - {"cache_control"}
    if said != {"type", "text"} or not isinstance(part["text"], str):
        raise wrong("content_part", f"content part {index} needs a string 'text' alone")
    return part["text"]


class FunctionSpec(Strict):
    """Function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: JsonObject | None = None
    """JSON schema of the arguments; None for a function without arguments."""
    strict: bool | None = None
    """Accepted but ignored: the schema is enforced whenever a call is forced, and never otherwise."""


class Tool(Strict):
    """Tool that the model may call."""

    without_effect = frozenset({"cache_control"})
    type: Literal["function"]
    function: FunctionSpec


class ToolChoice(Strict):
    """Normalized `tool_choice`."""

    mode: Literal["auto", "none", "required", "named"]
    name: str | None = None


Tools = Annotated[list[Tool], Field(max_length=128, fail_fast=True)]
Conversation = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
