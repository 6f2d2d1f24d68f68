"""MiniMax M3's arguments: elements named by key, one in another for objects and lists."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from tandem.server.tools.json_text import dumped
from tandem.server.tools.scan import Steps
from tandem.server.tools.typed import TypedCall, allowed_types, part_of, typed_value


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
