"""Repair of models' JSON while streaming, and tool calls written as JSON objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from tandem.server.tools.deltas import CallArguments, CallStart, Content
from tandem.server.tools.scan import SPACE, Feed, Steps, followed, held, next_visible, passed_on, space

Calls = list[tuple[str, str]]
"""(name, arguments as JSON) of each call."""
_BETWEEN_CALLS = SPACE + ",;}"
_MEMBER = re.compile(r'\s*,\s*"[^"\\}]*"\s*:\s*(?:"[^"\\}]*"|[^\s"{}\[\],]+)(?=\s*[,}])')
_HEAD = re.compile(r'\s*\{\s*(?:"(?:tool_call_id|id|type)"\s*:\s*"[^"\\]*"\s*,\s*)*"(?:tool_)?name"\s*:\s*"([^"\\]+)"'
                   r'\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)')  # fmt: skip
_IN_STRING = re.compile(r'(?P<plain>[^"\\\x00-\x1f]+)|(?P<quote>")|(?P<escape>\\[\s\S]?)|(?P<control>[\x00-\x1f])')
_OUTSIDE = re.compile(r'(?P<plain>[ \t\r\n:]+)|(?P<quote>")|(?P<open>[{\[])|(?P<close>[}\]])|(?P<comma>,[ \t\r\n]*)'
                      r"|(?P<word>[\w.+-]+)")  # fmt: skip
_NUMBER = re.compile(r"-?\d[\d.eE+-]*")
_WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null",
          "NaN": "null", "Infinity": "null", "-Infinity": "null"}  # fmt: skip
_ESCAPED = frozenset('"\\/bfnrtu')
_CALL_KEYS = {"name", "tool_name", "id", "tool_call_id", "type"}


class JsonMender:
    """Incremental reader of one JSON value that repairs models' typical mistakes.

    Control characters and invalid backslashes in strings are escaped, and trailing commas dropped. Python's True, False
    and None become JSON words; NaN and Infinity become null.
    """

    def __init__(self) -> None:
        self.text = ""
        """Repaired text so far."""
        self.over = False
        """True if the value is complete, or the next text is not JSON."""
        self._depth, self._quoted = 0, False

    def read(self, text: str, start: int, last: bool) -> int:
        """Continue reading at offset `start`; return the offset of the unread rest. `last`: nothing follows `text`."""
        while not self.over and start < len(text):
            found = (_IN_STRING if self._quoted else _OUTSIDE).match(text, start)
            kind, part = (found.lastgroup, found[0]) if found else ("", "")
            cut = start + len(part) == len(text) and (kind in ("comma", "word") or part == "\\")
            if cut and not last:
                break
            if not cut and (not found or (kind == "word" and part not in _WORDS and not _NUMBER.fullmatch(part))):
                self.over = True
                break
            start += len(part)
            self.text += part if part == "\\" else self._mended(kind, part, text[start : start + 1])
        return start

    def _mended(self, kind: str | None, part: str, after: str) -> str:
        if kind == "quote":
            self._quoted = not self._quoted
        elif kind in ("open", "close"):
            self._depth += 1 if kind == "open" else -1
            self.over = not self._depth
        elif kind == "comma" and after in ("}", "]"):
            return part[1:]
        elif kind == "word":
            return _WORDS.get(part, part)
        elif kind == "control" or (kind == "escape" and part[1] < " "):
            return json.dumps(part[-1])[1:-1]
        elif kind == "escape" and part[1] not in _ESCAPED:
            return "'" if part[1] == "'" else "\\" + part
        return part


def loads(text: str) -> object:
    """Repair and decode a complete JSON text. Raises ValueError or RecursionError."""
    mender = JsonMender()
    end = mender.read(text, 0, True)
    return json.loads(mender.text + text[end:])


def dumped(value: object) -> str:
    """Encode a value as valid JSON; lone surrogates are replaced. Raises ValueError for NaN and infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace").decode()


def json_object(feed: Feed, index: int) -> Steps[None]:
    """Stream the JSON object at the feed's start as arguments of call `index`, up to its end or to invalid JSON."""
    mender = JsonMender()
    while True:
        feed.take(mender.read(feed.text, 0, feed.ended))
        if mender.text:
            yield CallArguments(index, mender.text)
            mender.text = ""
        if mender.over or feed.ended:
            return
        yield None


def named_calls(feed: Feed, index: int, opening: str, closing: str = "") -> Steps[int]:
    """Read calls such as `{"name": ..., "arguments": {...}}`: one, several, or a list, then `closing`.

    Arguments stream if the name precedes them; other calls are read when complete. Without a call, `opening` becomes
    content. Return the index of the next call.
    """
    opening += yield from space(feed)
    first, listed = index, (yield from followed(feed, "["))
    opening += "[" if listed else ""
    while (yield from next_visible(feed, SPACE if index == first else _BETWEEN_CALLS)) == "{":
        before = index
        index = yield from _named_call(feed, index, opening)
        if index == before:
            return index
        opening = ""
    if opening and index == first:
        yield Content(opening)
    elif listed and (yield from followed(feed, "]")) and closing:
        yield from next_visible(feed)
    if index > first and closing:
        yield from followed(feed, closing)
    return index


def _named_call(feed: Feed, index: int, opening: str) -> Steps[int]:
    mender, read = JsonMender(), 0
    while True:
        if head := _HEAD.match(feed.text):
            feed.take(head.end())
            yield CallStart(index, head[1])
            yield from json_object(feed, index)
            yield from _members(feed)
            return index + 1
        read = mender.read(feed.text, read, feed.ended)
        if mender.over or feed.ended:
            break
        yield None
    text, calls = feed.take(read), whole_calls(mender.text)
    if not calls:
        yield Content(opening + text)
    return (yield from called(calls, index))


def called(calls: Calls, index: int) -> Steps[int]:
    """Yield the events of complete calls; return the index of the next call."""
    for name, arguments in calls:
        yield CallStart(index, name)
        yield CallArguments(index, arguments)
        index += 1
    return index


def complete_calls(feed: Feed, tags: Mapping[str, str], read: Callable[[str], Calls]) -> Steps[None]:
    """Read content, and calls between `tags` (opening to closing); `read` parses the text between when complete."""
    index = 0
    while opening := (yield from passed_on(feed, tuple(tags))):
        body, closing = yield from held(feed, (tags[opening],))
        if calls := read(body):
            index = yield from called(calls, index)
            yield from next_visible(feed)
        else:
            yield Content(opening + body + closing)


def _members(feed: Feed) -> Steps[None]:
    """Skip members of a call that follow its arguments, such as an "id"."""
    while True:
        if member := _MEMBER.match(feed.text):
            feed.take(member.end())
        elif feed.ended or "}" in feed.text or feed.text.lstrip()[:1] not in ("", ","):
            return
        else:
            yield None


def whole_calls(text: str) -> Calls:
    """Return the calls in a complete JSON text: one call, or a list of calls; empty for anything else."""
    try:
        value = loads(text)
        return [_whole_call(call) for call in (value if isinstance(value, list) else [value])]
    except (ValueError, RecursionError):
        return []


def _whole_call(call: object) -> tuple[str, str]:
    """Return name and arguments of a call. Raises ValueError for other JSON, even if it has a "name"."""
    if not isinstance(call, dict):
        raise ValueError("not an object")
    inner = call.get("function")
    call = inner if isinstance(inner, dict) else call
    if not ({"arguments", "parameters"} & call.keys() or call.keys() <= _CALL_KEYS):
        raise ValueError("not a call")
    name, arguments = call.get("name", call.get("tool_name")), call.get("arguments", call.get("parameters"))
    arguments = loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not isinstance(arguments, dict | None):
        raise ValueError("not a call")
    return name.encode("utf-8", "replace").decode(), dumped(arguments or {})
