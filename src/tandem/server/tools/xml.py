"""GLM, LongCat and Qwen3-Coder: each argument between tags of its own; its type comes from the tool's schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tandem.server.tools.events import CallArguments, CallStart, Content
from tandem.server.tools.scan import Feed, Steps, Tools, dumped, followed, held, next_visible, passed_on

OPEN, CLOSE = "<tool_call>", "</tool_call>"
KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END = "<function=", "</function>", "<parameter=", "</parameter>"
NAME = re.compile(r"[\w.:/-]+")


@dataclass(frozen=True)
class Tags:
    """What a format with keys and values puts around them."""

    open: str = OPEN
    close: str = CLOSE
    key: str = KEY
    key_end: str = KEY_END
    value: str = VALUE
    value_end: str = VALUE_END


LONGCAT = Tags("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", "</longcat_arg_key>",
               "<longcat_arg_value>", "</longcat_arg_value>")  # fmt: skip


def glm(feed: Feed, tools: Tools, tags: Tags = Tags()) -> Steps[None]:
    """`<tool_call>name<arg_key>k</arg_key><arg_value>v</arg_value>...</tool_call>`."""
    index = 0
    while (yield from passed_on(feed, (tags.open,))):
        name, marker = yield from held(feed, (tags.key, tags.close))
        if not NAME.fullmatch(name.strip()):
            yield Content(tags.open + name + marker)
            continue
        call = TypedCall(index, name.strip(), tools)
        yield call.start()
        while marker == tags.key:
            key, _ = yield from held(feed, (tags.key_end,))
            yield from next_visible(feed)
            yield from followed(feed, tags.value)
            value, marker = yield from held(feed, (tags.value_end, tags.close))
            yield call.argument(key.strip(), value)
            if marker == tags.value_end:
                _, marker = yield from held(feed, (tags.key, tags.close))
        yield call.end()
        index += 1


def longcat(feed: Feed, tools: Tools) -> Steps[None]:
    """As GLM, with tags of its own."""
    yield from glm(feed, tools, LONGCAT)


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
        if not NAME.fullmatch(name.strip()):
            yield Content(FUNCTION + name + end)
            continue
        call = TypedCall(index, name.strip(), tools)
        yield call.start()
        while (yield from held(feed, (PARAMETER, FUNCTION_END)))[1] == PARAMETER:
            key, _ = yield from held(feed, (">",))
            value, _ = yield from held(feed, (PARAMETER_END,))
            yield call.argument(key.strip(), value.removeprefix("\n").removesuffix("\n"))
        yield call.end()
        index += 1
        if (yield from next_visible(feed)):
            yield from followed(feed, CLOSE)


class TypedCall:
    """Puts the arguments of one call together as JSON, one at a time."""

    def __init__(self, index: int, name: str, tools: Tools) -> None:
        self.name = name
        self._index = index
        properties = tools.get(name, {}).get("properties", {})
        self._types: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._text = "{"

    def start(self) -> CallStart:
        """What comes before the arguments."""
        return CallStart(self._index, self.name)

    def argument(self, key: str, value: str) -> CallArguments:
        """One more argument."""
        return self.value(key, typed_value(value, self._types.get(key)))

    def value(self, key: str, text: str) -> CallArguments:
        """One more argument whose value is JSON already."""
        text = f"{self._text}{dumped(key)}: {text}"
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
