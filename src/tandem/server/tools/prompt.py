"""Tools in the prompt: for templates that know them, and for models whose template does not."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from tandem.server.tools.json_calls import CLOSE, OPEN

INSTRUCTIONS = (
    "You may call functions to help with the user's request. Their signatures are within <tools></tools>:\n<tools>\n{}"
    '\n</tools>\nTo call one, answer with its name and arguments as a JSON object within tags:\n<tool_call>\n{{"name": '
    '<name>, "arguments": <arguments>}}\n</tool_call>'
)
Message = Mapping[str, Any]


def knows_tools(template: str) -> bool:
    """The chat template puts tools into the prompt."""
    return "tools" in template


def plain_messages(messages: Sequence[Message], tools: Sequence[Message]) -> list[dict[str, Any]]:
    """The conversation in terms that any template knows: tools and calls as text, in hermes' format."""
    plain: list[dict[str, Any]] = []
    for results, group in groupby(messages, key=lambda message: message["role"] == "tool"):
        if results:
            texts = [f"<tool_response>\n{message['content']}\n</tool_response>" for message in group]
            plain.append({"role": "user", "content": "\n".join(texts)})
            continue
        for message in group:
            text = "\n".join([*filter(None, [message["content"]]), *map(_call, message.get("tool_calls", ()))])
            plain.append({**{key: value for key, value in message.items() if key != "tool_calls"}, "content": text})
    if tools:
        told = INSTRUCTIONS.format("\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
        if plain and plain[0]["role"] == "system":
            plain[0]["content"] = f"{plain[0]['content']}\n\n{told}"
        else:
            plain.insert(0, {"role": "system", "content": told})
    return plain


def _call(call: Message) -> str:
    function = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
    return f"{OPEN}\n{json.dumps(function, ensure_ascii=False)}\n{CLOSE}"
