"""MiniMax M2, DeepSeek V3.2 and Muse: `invoke` elements with a name, and in them one `parameter` element each."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tandem.server.tools.events import CallArguments, Content
from tandem.server.tools.scan import Feed, Steps, Tools, dumped, held, next_visible, passed_on
from tandem.server.tools.xml import NAME, TypedCall

_NAMED = re.compile(r"""\s+name\s*=\s*(?:"([^"]*)"|'([^']*)'|([^\s"'>]+))""")
_STRING = re.compile(r"""\sstring\s*=\s*["']?(true|false)\b""")


@dataclass(frozen=True)
class Elements:
    """Names of the elements, without brackets."""

    all: str
    one: str
    argument: str
    marks: tuple[str, ...] = ()
    """Special tokens that these names are made of."""

    @property
    def open(self) -> str:
        """The tag before all calls."""
        return f"<{self.all}>"

    @property
    def close(self) -> str:
        """The tag after all calls."""
        return f"</{self.all}>"


MINIMAX = Elements("minimax:tool_call", "invoke", "parameter")
DSML = Elements("｜DSML｜function_calls", "｜DSML｜invoke", "｜DSML｜parameter", ("｜DSML｜",))
MUSE = Elements("atem:function_calls", "atem:invoke", "atem:parameter")


def minimax(feed: Feed, tools: Tools) -> Steps[None]:
    """`<minimax:tool_call><invoke name="f"><parameter name="k">v</parameter></invoke></minimax:tool_call>`."""
    yield from _invoked(feed, tools, MINIMAX)


def dsml(feed: Feed, tools: Tools) -> Steps[None]:
    """The same in DeepSeek's elements, whose parameters say whether they are strings or JSON."""
    yield from _invoked(feed, tools, DSML)


def muse(feed: Feed, tools: Tools) -> Steps[None]:
    """The same in Muse's elements."""
    yield from _invoked(feed, tools, MUSE)


def _invoked(feed: Feed, tools: Tools, names: Elements) -> Steps[None]:
    index = 0
    while (yield from passed_on(feed, (names.open,))):
        before = index
        index = yield from _section(feed, index, tools, names)
        if index > before:
            yield from next_visible(feed)


def _section(feed: Feed, index: int, tools: Tools, names: Elements) -> Steps[int]:
    """All calls of one section, whose opening tag is read; returns the index of the next call."""
    opening, start = names.open, f"<{names.one} "
    while True:
        text, marker = yield from held(feed, (start, names.close))
        if marker != start:
            if opening or text.strip():
                yield Content(opening + text + (marker if opening else ""))
            return index
        if text.strip():
            yield Content(opening + text)
            opening = ""
        head, end = yield from held(feed, (">",))
        name = _name(head)
        if not name or not NAME.fullmatch(name):
            yield Content(opening + start + head + end)
            return index
        opening = ""
        over = yield from _call(feed, TypedCall(index, name, tools), names)
        index += 1
        if over:
            return index


def _call(feed: Feed, call: TypedCall, names: Elements) -> Steps[bool]:
    """The arguments of one call; returns whether the section ends with it."""
    yield call.start()
    argument, end = f"<{names.argument} ", f"</{names.one}>"
    marker = argument
    while marker == argument:
        _, marker = yield from held(feed, (argument, end, names.close))
        if marker == argument:
            head, _ = yield from held(feed, (">",))
            value, _ = yield from held(feed, (f"</{names.argument}>",))
            yield _argument(call, head, value)
    yield call.end()
    return marker == names.close


def _argument(call: TypedCall, head: str, value: str) -> CallArguments:
    key, string = _name(head) or "", _STRING.search(head)
    if string is None:
        return call.argument(key, value.removeprefix("\n").removesuffix("\n"))
    if string[1] == "false":
        try:
            return call.value(key, dumped(json.loads(value)))
        except (ValueError, RecursionError):
            pass
    return call.value(key, dumped(value))


def _name(head: str) -> str | None:
    """The attribute `name`, with quotes of either kind or none."""
    found = _NAMED.search(f" {head}")
    return next((text for text in found.groups() if text is not None), None) if found else None
