"""Tool call formats with a tag per argument: GLM, LongCat, Qwen3-Coder, Seed, MiniMax M2, DeepSeek V3.2, Kimi K3, ..."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import unescape

from tandem.json_types import JsonMapping
from tandem.server.tools.deltas import CallArguments, CallStart, Content
from tandem.server.tools.json_text import dumped, json_object, loads
from tandem.server.tools.scan import Feed, Steps, Tools, first, followed, held, next_visible, passed_on, space

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
          type(None): "null"}  # fmt: skip
_DEEPEST = 16


class TypedCall:
    """Builder of one call's arguments as JSON, one argument at a time."""

    def __init__(self, index: int, name: str, tools: Tools) -> None:
        self.name, self.index = name, index
        self.schema = tools.get(name, {})
        self._text = "{"

    @property
    def empty(self) -> bool:
        """True while there is no argument."""
        return self._text == "{"

    def argument(self, key: str, value: str) -> CallArguments:
        """Return the event for one more argument, converted to the type in the tool's schema."""
        return self.value(key, typed_value(value, part_of(self.schema, self.schema, "properties", key), self.schema))

    def value(self, key: str, text: str) -> CallArguments:
        """Return the event for one more argument whose value `text` is JSON."""
        text = f"{self._text}{dumped(key)}: {text}"
        self._text = ", "
        return CallArguments(self.index, text)

    def end(self) -> CallArguments:
        """Return the event that closes the JSON object."""
        return CallArguments(self.index, "{}" if self.empty else "}")


@dataclass
class _Element:
    name: str
    text: str = ""
    inside: list[_Element] = field(default_factory=list)


def nested_arguments(call: TypedCall, body: str, mark: str) -> Steps[None]:
    """Yield the arguments of a call from its complete `body` of nested tags; `mark` precedes each tag."""
    text, *parts = re.split(re.escape(mark) + r"<(/?)([\w:.$-]+)>", body)
    path = [_Element("", text)]
    for slash, name, text in zip(parts[::3], parts[1::3], parts[2::3], strict=True):
        if not slash:
            path.append(_Element(name))
            path[-2].inside.append(path[-1])
        elif any(element.name == name for element in path[1:]):
            while path.pop().name != name:
                pass
        path[-1].text += text
    for key, value in _members(path[0], call.schema, call.schema).items():
        yield call.value(key, value)


def _members(element: _Element, schema: object, root: object) -> dict[str, str]:
    """Return the members of an object as JSON, by key; a repeated key becomes a list."""
    found: dict[str, list[str]] = {}
    for member in element.inside:
        found.setdefault(member.name, []).append(_json(member, part_of(schema, root, "properties", member.name), root))
    return {name: values[0] if len(values) == 1 else f"[{', '.join(values)}]" for name, values in found.items()}


def _json(element: _Element, schema: object, root: object) -> str:
    types, _ = allowed_types(schema, root)
    empty = not (element.inside or element.text.strip() or "string" in types)
    if ("array" in types and (element.inside or empty)) or (
        element.inside and "object" not in types and all(member.name == "item" for member in element.inside)
    ):
        items = part_of(schema, root, "items")
        return f"[{', '.join(_json(member, items, root) for member in element.inside)}]"
    if element.inside or (empty and "object" in types):
        members = _members(element, schema, root).items()
        return "{" + ", ".join(f"{dumped(name)}: {value}" for name, value in members) + "}"
    return typed_value(element.text, schema, root)


def part_of(schema: object, root: object, *path: str) -> object:
    """Return the value at `path` in `schema` or in its anyOf, oneOf, allOf and $ref parts; None if there is none."""
    return next((part for choice in _alternatives(schema, root) if (part := _at(choice, path)) is not None), None)


def allowed_types(schema: object, root: object) -> tuple[set[str], list[object]]:
    """Return the JSON types that `schema`, a part of `root`, allows, and its enum or const values."""
    types, choices = set[str](), list[object]()
    for part in _alternatives(schema, root):
        kind = part.get("type")
        types.update(kind if isinstance(kind, list) else [kind] if kind else ())
        choices += part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    return types | {_TYPES.get(type(choice), "") for choice in choices}, choices


def typed_value(text: str, schema: object, root: object) -> str:
    """Return `text` as a JSON value of a type that `schema`, a part of `root`, allows; else as a string."""
    allowed, choices = allowed_types(schema, root)
    if allowed == {"string"} or text in choices:
        return dumped(text)
    parsers: tuple[Callable[[str], object], ...] = (json.loads, loads, ast.literal_eval) if allowed else (json.loads,)
    for parse in parsers:
        try:
            with warnings.catch_warnings(action="ignore"):  # of escapes in a model's strings
                value = parse(text.strip())
            kind = _TYPES.get(type(value), "")
            if kind in allowed or (kind == "integer" and "number" in allowed) or not (allowed or kind == "string"):
                return dumped(value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            pass
    return dumped(text)


def _alternatives(schema: object, root: object, depth: int = 0) -> Iterator[JsonMapping]:
    """Yield a schema and, recursively, its anyOf, oneOf, allOf and $ref parts."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    yield schema
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _alternatives(part, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _alternatives(_at(root, reference.removeprefix("#/").split("/")), root, depth + 1)


def _at(value: object, path: Iterable[str]) -> object:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


NAME = re.compile(r"[\w.:/-]+")
_ATTRIBUTE = re.compile(r"""([\w-]+)\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_CDATA = "<![CDATA["


@dataclass(frozen=True)
class Tags:
    """Tags of a format around calls and arguments. After a tag that ends with a space, attributes follow."""

    call: str
    call_end: str
    argument: str
    value_end: str
    head_end: str = ">"
    """Text that ends the name of a call; empty if the first argument or the end of the call ends it."""
    key_end: str = ">"
    value: str = ""
    """Text between `key_end` and the value, if any."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Closing by opening tag around all calls; empty if calls have no section."""
    bare: bool = False
    """True if calls may also appear outside of a section."""
    json: str = ""
    """Tag before all arguments as one JSON object, if the format has one."""
    cdata: bool = False
    """True if values may be CDATA sections."""
    nested: str = ""
    """Mark before every tag, for formats whose arguments are nested elements."""

    @property
    def starts(self) -> tuple[str, ...]:
        """Tags that may begin calls."""
        return (*self.sections, *((self.call,) if self.bare or not self.sections else ()))

    @property
    def others(self) -> tuple[str, ...]:
        """All other tags."""
        return (*self.sections.values(), self.call, self.call_end, self.argument, self.value_end, self.key_end)


def _invoke(*sections: str, prefix: str = "") -> Tags:
    return Tags(f"<{prefix}invoke ", f"</{prefix}invoke>", f"<{prefix}parameter ", f"</{prefix}parameter>",
                sections={f"<{name}>": f"</{name}>" for name in sections})  # fmt: skip


def _functions(section: str) -> Tags:
    return Tags("<function=", "</function>", "<parameter=", "</parameter>",
                sections={f"<{section}>": f"</{section}>"}, bare=True)  # fmt: skip


def _pairs(prefix: str = "") -> Tags:
    return Tags(f"<{prefix}tool_call>", f"</{prefix}tool_call>", f"<{prefix}arg_key>", f"</{prefix}arg_value>",
                head_end="", key_end=f"</{prefix}arg_key>", value=f"<{prefix}arg_value>")  # fmt: skip


GLM, LONGCAT = _pairs(), _pairs("longcat_")
SOLAR = Tags("<|tool_call:start|>", "<|tool_call:end|>", "<|tool_arg:start|>", "<|tool_arg:end|>", head_end="",
             key_end="<|tool_arg:value|>")  # fmt: skip
QWEN_CODER, SEED = _functions("tool_call"), _functions("seed:tool_call")
MINIMAX = _invoke("minimax:tool_call")
DSML = _invoke("｜DSML｜function_calls", "｜DSML｜tool_calls", prefix="｜DSML｜")
MUSE = _invoke("atem:function_calls", prefix="atem:")
MINICPM = Tags("<function ", "</function>", "<param ", "</param>", cdata=True)
MINIMAX_M3 = Tags("]<]minimax[>[<invoke ", "]<]minimax[>[</invoke>", "", "", nested="]<]minimax[>[",
                  sections={"]<]minimax[>[<tool_call>": "]<]minimax[>[</tool_call>"})  # fmt: skip
KIMI_K3 = Tags("<|open|>call ", "<|close|>call<|sep|>", "<|open|>argument ", "<|close|>argument<|sep|>",
               head_end="<|sep|>", key_end="<|sep|>", json="<|open|>json",
               sections={"<|open|>tools<|sep|>": "<|close|>tools<|sep|>"})  # fmt: skip


def tagged(feed: Feed, tools: Tools, tags: Tags) -> Steps[None]:
    """Read content, and calls in the format of `tags`; the schemas in `tools` determine the types of arguments."""
    index, closing, called = 0, "", False
    while marker := (yield from passed_on(feed, (*tags.starts, tags.call, closing) if closing else tags.starts)):
        opening = ""
        if marker in tags.sections:
            closing, called = tags.sections[marker], False
            opening = marker + (yield from space(feed))
            marker = tags.call if (yield from followed(feed, tags.call)) else ""
        elif marker == closing:
            opening, marker, closing = "" if called else marker, "", ""
        if not marker:
            yield Content(opening)
            continue
        head, end = yield from held(feed, (tags.head_end,) if tags.head_end else (tags.argument, tags.call_end))
        if not tags.head_end:
            feed.text, end = end + feed.text, ""
        name = _attributes(tags.call, head)["name"]
        if not NAME.fullmatch(name):
            yield Content(opening + marker + head + end)
            continue
        called = True
        if (yield from _arguments(feed, TypedCall(index, name, tools), tags, closing)) == closing:
            closing = ""
        if closing:
            yield from next_visible(feed)
        index += 1


def _arguments(feed: Feed, call: TypedCall, tags: Tags, closing: str) -> Steps[str]:
    """Read the arguments of one call; return the tag that ended them. The tag of a next call is put back into the feed."""
    ends = (tags.call_end, closing) if closing else (tags.call_end,)
    opens = (*tags.sections, tags.call)
    yield CallStart(call.index, call.name)
    if tags.nested:
        body, marker = yield from held(feed, ends)
        yield from nested_arguments(call, body, tags.nested)
    while not tags.nested:
        _, marker = yield from held(feed, (tags.argument, tags.json or tags.argument, *ends, *opens))
        if marker == tags.argument:
            head, _ = yield from held(feed, (tags.key_end,))
            if tags.value:
                yield from next_visible(feed)
                yield from followed(feed, tags.value)
            yield _argument(call, tags, head, (yield from _value(feed, tags, ends, opens)))
        elif marker and marker == tags.json and call.empty:
            yield from held(feed, (tags.key_end,))
            if (yield from next_visible(feed)) == "{":
                yield from json_object(feed, call.index)
                return (yield from held(feed, ends))[1]
        elif marker != tags.json or not marker:
            break
    yield call.end()
    if marker in opens:
        feed.text = marker + feed.text
    return marker


def _value(feed: Feed, tags: Tags, ends: tuple[str, ...], opens: tuple[str, ...]) -> Steps[str]:
    """Read a value up to its closing tag, or, if that is missing, up to the next argument or the call's end."""
    while True:
        quoted = feed.text.find("]]>") if tags.cdata and feed.text.lstrip().startswith(_CDATA) else 0
        start = len(feed.text) if quoted < 0 else quoted
        place, marker = first(feed.text, (tags.value_end, tags.argument), start)
        end, closing = first(feed.text[:place], ends, start)
        if marker == tags.argument or (closing and first(feed.text[:place], opens, end)[1]):
            return feed.take(end)
        if marker or feed.ended:
            value = feed.take(place if marker else end)
            feed.take(len(marker))
            return value.strip()[len(_CDATA) : -3] if quoted else value
        yield None


def _argument(call: TypedCall, tags: Tags, head: str, value: str) -> CallArguments:
    attributes = _attributes(tags.argument, head)
    key, kind = attributes["name"], attributes.get("type") or attributes.get("string")
    if kind is None:
        return call.argument(key, value if tags.value else value.removeprefix("\n").removesuffix("\n"))
    try:
        return call.value(key, dumped(value if kind in ("string", "true") else loads(value)))
    except (ValueError, RecursionError):
        return call.value(key, dumped(value))


def _attributes(tag: str, head: str) -> dict[str, str]:
    """Return a tag's attributes, quoted or not. `name` is also Kimi K3's `tool` or `key`, or the text without attributes."""
    if not tag.endswith(" "):
        return {"name": head.strip()}
    found = {name: unescape(one or two or bare) for name, one, two, bare in _ATTRIBUTE.findall(head)}
    return {"name": found.get("tool") or found.get("key") or "", **found}
