"""Arguments that were written without quotes, as JSON of the types that a tool's schema asks for.

MiniMax M3 writes elements named by key, one in another for objects and lists.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tandem.server.tools.events import CallArguments
from tandem.server.tools.json_text import dumped, loads
from tandem.server.tools.scan import Steps, Tools

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object",
          type(None): "null"}  # fmt: skip
_DEEPEST = 16


class TypedCall:
    """Puts the arguments of one call together as JSON, one at a time."""

    def __init__(self, index: int, name: str, tools: Tools) -> None:
        self.name, self.index = name, index
        self.schema = tools.get(name, {})
        self._text = "{"

    @property
    def empty(self) -> bool:
        """There are no arguments yet."""
        return self._text == "{"

    def argument(self, key: str, value: str) -> CallArguments:
        """One more argument, of the type that the schema asks for."""
        return self.value(key, typed_value(value, part_of(self.schema, self.schema, "properties", key), self.schema))

    def value(self, key: str, text: str) -> CallArguments:
        """One more argument whose value is JSON already."""
        text = f"{self._text}{dumped(key)}: {text}"
        self._text = ", "
        return CallArguments(self.index, text)

    def end(self) -> CallArguments:
        """The end of the object."""
        return CallArguments(self.index, "{}" if self.empty else "}")


@dataclass
class _Element:
    name: str
    text: str = ""
    inside: list[_Element] = field(default_factory=list)


def nested_arguments(call: TypedCall, body: str, mark: str) -> Steps[None]:
    """All arguments of a call, which `body` holds; `mark` stands before every tag."""
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


def _members(element: _Element, schema: Any, root: Any) -> dict[str, str]:
    """JSON of what an object holds, by key; a key that comes several times is a list."""
    found: dict[str, list[str]] = {}
    for member in element.inside:
        found.setdefault(member.name, []).append(_json(member, part_of(schema, root, "properties", member.name), root))
    return {name: values[0] if len(values) == 1 else f"[{', '.join(values)}]" for name, values in found.items()}


def _json(element: _Element, schema: Any, root: Any) -> str:
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


def part_of(schema: Any, root: Any, *path: str) -> Any:
    """What stands at `path` in a schema, or in one of those that it is put together from; None if nothing does."""
    return next((part for one in _alternatives(schema, root) if (part := _at(one, path)) is not None), None)


def allowed_types(schema: Any, root: Any) -> tuple[set[str], list[Any]]:
    """JSON types that `schema`, a part of `root`, allows, and the values if it lists them."""
    types, choices = set[str](), list[Any]()
    for part in _alternatives(schema, root):
        kind = part.get("type")
        types.update(kind if isinstance(kind, list) else [kind] if kind else ())
        choices += part["enum"] if isinstance(part.get("enum"), list) else [part["const"]] if "const" in part else []
    return types | {_TYPES.get(type(choice), "") for choice in choices}, choices


def typed_value(text: str, schema: Any, root: Any) -> str:
    """JSON of a value whose `schema`, a part of `root`, tells numbers and the like from text that looks like them."""
    allowed, choices = allowed_types(schema, root)
    if allowed == {"string"} or text in choices:
        return dumped(text)
    parsers: tuple[Callable[[str], Any], ...] = (json.loads, loads, ast.literal_eval) if allowed else (json.loads,)
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


def _alternatives(schema: Any, root: Any, depth: int = 0) -> Iterator[Mapping[str, Any]]:
    """A schema, and those that it is put together from."""
    if not isinstance(schema, Mapping) or depth > _DEEPEST:
        return
    yield schema
    for key in ("anyOf", "oneOf", "allOf"):
        for part in schema[key] if isinstance(schema.get(key), list) else ():
            yield from _alternatives(part, root, depth + 1)
    if isinstance(reference := schema.get("$ref"), str):
        yield from _alternatives(_at(root, reference.removeprefix("#/").split("/")), root, depth + 1)


def _at(value: Any, path: Iterable[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value
