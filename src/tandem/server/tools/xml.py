"""GLM and Qwen3-Coder: each argument between tags of its own, so that its type must come from the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tandem.server.tools.events import CallArguments, CallStart, Content
from tandem.server.tools.scan import Feed, Steps, Tools, dumped, followed, held, next_visible, passed_on

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
_NAME = re.compile(r"[\w.:/-]+")


def glm(feed: Feed, tools: Tools) -> Steps[None]:
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`."""
    index = 0
    while (yield from passed_on(feed, (OPEN,))):
        name, marker = yield from held(feed, (KEY, CLOSE))
        if not _NAME.fullmatch(name.strip()):
            yield Content(OPEN + name + marker)
            continue
        call = _Call(index, name.strip(), tools)
        yield CallStart(index, call.name)
        while marker == KEY:
            key, _ = yield from held(feed, (KEY_END,))
            yield from next_visible(feed)
            yield from followed(feed, VALUE)
            value, marker = yield from held(feed, (VALUE_END, CLOSE))
            yield call.argument(key.strip(), value)
            if marker == VALUE_END:
                _, marker = yield from held(feed, (KEY, CLOSE))
        yield call.end()
        index += 1


def qwen_coder(feed: Feed, tools: Tools) -> Steps[None]:
    """`<tool_call><function=name><parameter=k>v</parameter>...</function></tool_call>`."""
    index = 0
    while marker := (yield from passed_on(feed, (OPEN, FUNCTION))):
        if marker == OPEN:
            yield from next_visible(feed)
            if not (yield from followed(feed, FUNCTION)):
                yield Content(OPEN)
                continue
        name, end = yield from held(feed, (">",))
        if not _NAME.fullmatch(name.strip()):
            yield Content(FUNCTION + name + end)
            continue
        call = _Call(index, name.strip(), tools)
        yield CallStart(index, call.name)
        while (yield from held(feed, (PARAMETER, FUNCTION_END)))[1] == PARAMETER:
            key, _ = yield from held(feed, (">",))
            value, _ = yield from held(feed, (PARAMETER_END,))
            yield call.argument(key.strip(), value.removeprefix("\n").removesuffix("\n"))
        yield call.end()
        index += 1
        if (yield from next_visible(feed)):
            yield from followed(feed, CLOSE)


class _Call:
    """Puts the arguments of one call together as JSON, one at a time."""

    def __init__(self, index: int, name: str, tools: Tools) -> None:
        self.name = name
        self._index = index
        properties = tools.get(name, {}).get("properties", {})
        self._types: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._text = "{"

    def argument(self, key: str, value: str) -> CallArguments:
        """One more argument."""
        typed = typed_value(value, self._types.get(key))
        text = f"{self._text}{dumped(key)}: {typed}"
        self._text = ", "
        return CallArguments(self._index, text)

    def end(self) -> CallArguments:
        """The end of the object."""
        return CallArguments(self._index, "{}" if self._text == "{" else "}")


def typed_value(text: str, schema: Any) -> str:
    """A value that was written without quotes, as JSON of the type that its schema asks for."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = kind if isinstance(kind, list) else [kind]
    if kinds != ["string"]:
        try:
            value = json.loads(text.strip())
            if not (isinstance(value, str) or ("string" in kinds and not isinstance(value, dict | list | None))):
                return dumped(value)
        except (ValueError, RecursionError):
            pass
    return dumped(text)
