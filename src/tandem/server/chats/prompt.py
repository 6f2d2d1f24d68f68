"""Render conversations as prompts and tokenize them. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from tandem.json_types import JsonMapping, JsonObject
from tandem.protocol.pictures import Picture
from tandem.server.openai.messages import Message
from tandem.server.tools.choose import knows_tools
from tandem.server.tools.json_calls import CLOSE, OPEN
from tandem.text.tokenizer import Tokenizer, encode_fitting

END = 64
"""Characters at the end of a prompt to search for an opening reasoning tag."""


INSTRUCTIONS = (
    "You may call functions to help with the user's request. Their signatures are within <tools></tools>:\n<tools>\n{}"
    '\n</tools>\nTo call one, answer with its name and arguments as a JSON object within tags:\n<tool_call>\n{{"name": '
    '<name>, "arguments": <arguments>}}\n</tool_call>'
)
"""System prompt with tools for models whose chat template does not support them."""


class Rendered(NamedTuple):
    """Prompt as token ids, with the end of its text."""

    tokens: list[int]
    end: str
    """Last `END` characters of the prompt's text."""
    pictures: tuple[Picture, ...] = ()


class Marks(NamedTuple):
    """Texts that stand for pictures."""

    mark: str
    """Text in place of a picture in the messages; no client can guess it."""
    placeholder: str
    """Text in its place in the prompt."""


def rendered(tokenizer: Tokenizer, context: int, conversation: JsonMapping, *, quick: bool) -> Rendered:
    """Return the prompt of `conversation` (keyword arguments of `prompt_text`). `context`: its limit in tokens.

    Raises what `prompt_text` and `encode_fitting` raise.
    """
    text = prompt_text(tokenizer, **conversation, quick=quick)
    return Rendered(encode_fitting(tokenizer, text, context, "messages", special=False), text[-END:])


def prompt_text(
    tokenizer: Tokenizer,
    messages: Sequence[JsonMapping],
    *,
    tools: Sequence[JsonMapping],
    variables: JsonMapping,
    add_generation_prompt: bool,
    quick: bool,
    marks: Marks | None = None,
) -> str:
    """Render the conversation with the model's chat template; `tools` become text where it does not support them.

    `marks`: None without pictures. Raises RequestError if there is no template or it rejects the messages; with `quick`,
    TooExpensive for a slow one.
    """
    messages = [_with_objects(message) for message in messages]
    calls = any(message["role"] == "tool" or "tool_calls" in message for message in messages)
    if (tools or calls) and not knows_tools(tokenizer.chat_template):
        messages, tools = plain_messages(messages, tools), []
    if marks is not None:
        messages = [_with_parts(tokenizer, message, marks) for message in messages]
    return tokenizer.template.render(
        messages, tools=tools or None, add_generation_prompt=add_generation_prompt, variables=variables, quick=quick
    )


def template_input(message: Message, mark: str = "") -> JsonObject:
    """Return a message for chat templates, with call arguments as strings; the role `developer` becomes `system`.

    `mark`: text for each picture.
    """
    role = "system" if message.role == "developer" else message.role
    extras = {name: getattr(message, name) for name in ("name", "reasoning_content", "tool_call_id")}
    content = message.content or ""
    if mark:
        ends = [picture.at for picture in message.pictures]
        content = mark.join(content[a:b] for a, b in zip([0, *ends], [*ends, None], strict=True))
    shown: JsonObject = {"role": role, "content": content}
    shown |= {name: value for name, value in extras.items() if value is not None}
    if message.tool_calls:
        shown["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": call.function.arguments}}
            for call in message.tool_calls
        ]
    return shown


def _with_parts(tokenizer: Tokenizer, message: JsonMapping, marks: Marks) -> JsonMapping:
    """Return the message with its pictures as content parts, or as placeholders for templates that read text alone.

    A message without pictures keeps its text, unless the template reads parts alone.
    """
    texts = message["content"].split(marks.mark)
    if "image" not in tokenizer.template_words:
        return {**message, "content": marks.placeholder.join(texts)}
    if len(texts) == 1 and "is string" in tokenizer.chat_template:
        return message
    parts = [part for text in texts for part in ({"type": "text", "text": text}, {"type": "image"})][:-1]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _with_objects(message: JsonMapping) -> JsonMapping:
    """Return the message with call arguments parsed from JSON where possible, as chat templates expect."""
    if "tool_calls" not in message:
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _object(arguments: object) -> object:
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments


def plain_messages(messages: Sequence[JsonMapping], tools: Sequence[JsonMapping]) -> list[JsonObject]:
    """Return the conversation with tools, calls and results as text in Hermes' format, for templates without tools."""
    plain: list[JsonObject] = []
    for results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if results:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            plain.append({"role": "user", "content": "\n".join(texts)})
            continue
        for message in group:
            text = "\n".join([*filter(None, [message["content"]]), *map(_call_text, message.get("tool_calls", ()))])
            plain.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text})
    if tools:
        told = INSTRUCTIONS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0]['content']}\n\n{told}"
        else:
            plain.insert(0, {"role": "system", "content": told})
    return plain


def _call_text(call: JsonMapping) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}"
