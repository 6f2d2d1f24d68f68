"""The prompt that a conversation comes to. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tandem.server.chats.fitting import encode_fitting
from tandem.server.openai.messages import Message
from tandem.server.tools.prompt import knows_tools, plain_messages
from tandem.text.tokenizer import Tokenizer

_END = 64
"""Characters at the end of a prompt that may hold the tag which opens the reasoning."""


class Rendered(NamedTuple):
    """A prompt."""

    tokens: list[int]
    end: str
    """How its text ends."""


def rendered(tokenizer: Tokenizer, context: int, conversation: Mapping[str, Any], *, quick: bool) -> Rendered:
    """The prompt of a conversation: arguments of `prompt_text` by their names. Raises as it and `encode_fitting` do."""
    text = prompt_text(tokenizer, **conversation, quick=quick)
    return Rendered(encode_fitting(tokenizer, text, context, "messages", special=False), text[-_END:])


def prompt_text(tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Mapping[str, Any]],
                variables: Mapping[str, Any], add_generation_prompt: bool, quick: bool) -> str:
    """The conversation in the model's chat template, which is told of the `tools` in the way that it knows.

    Raises RequestError when there is no template, or it refuses the messages; with `quick` TooExpensive when it takes
    more than a moment.
    """
    messages = [_with_objects(message) for message in messages]
    calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if (tools or calls) and not knows_tools(tokenizer.chat_template):
        messages, tools = plain_messages(messages, tools), []
    return tokenizer.template.render(messages, tools=tools or None, add_generation_prompt=add_generation_prompt,
                                     variables=variables, quick=quick)


def template_input(message: Message) -> dict[str, Any]:
    """As chat templates expect it, but with the arguments of calls as texts. OpenAI's `developer` is what everyone else
    calls `system`."""
    role = "system" if message.role == "developer" else message.role
    extras = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    given: dict[str, Any] = {"role": role, "content": message.content or ""}
    given |= {name: value for name, value in extras.items() if value is not None}
    if message.tool_calls:
        given["tool_calls"] = [{"id": call.id, "type": "function", "function": {"name": call.function.name,
                                "arguments": call.function.arguments}} for call in message.tool_calls]
    return given


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its calls as objects where they are such: chat templates expect them so."""
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
             for call in message["tool_calls"]]
    return {**message, "tool_calls": calls}


def _object(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
