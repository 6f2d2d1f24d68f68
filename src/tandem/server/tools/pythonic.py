"""LFM2 and Llama 4: a Python list of calls with named arguments, between tokens or as the whole answer."""

from __future__ import annotations

import ast
import re
import warnings

from tandem.server.tools.events import CallArguments, CallStart, Content
from tandem.server.tools.llama3 import llama3
from tandem.server.tools.scan import Feed, Steps, dumped, everything, held, next_visible, passed_on, whole_calls

TAGS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
"""Opening and closing token of LFM2, and of Llama 4."""
SIGNS = (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("<|python_start|>",), ("<|header_start|>",))
"""Each of these, in a template, tells one of the two."""
_HEAD = re.compile(r"\[\s*(?:[A-Za-z_](?:[\w.]*\s*(?:\(.*)?)?)?", re.DOTALL)
_WORDS = {"true": True, "false": False, "null": None}
Calls = list[tuple[str, str]]


def pythonic(feed: Feed) -> Steps[None]:
    """Content, and calls between tokens; or nothing but calls, in Llama's JSON too."""
    first = yield from next_visible(feed)
    if first == "{":
        yield from llama3(feed)
    elif first == "[":
        yield from _bare(feed)
    index = 0
    while opening := (yield from passed_on(feed, tuple(TAGS))):
        body, closing = yield from held(feed, (TAGS[opening],))
        calls = _python_calls(body) or whole_calls(body)
        if not calls:
            yield Content(opening + body + closing)
            continue
        for name, arguments in calls:
            yield CallStart(index, name)
            yield CallArguments(index, arguments)
            index += 1
        yield from next_visible(feed)


def _bare(feed: Feed) -> Steps[None]:
    """The whole answer, which begins with a bracket, as calls if it is a list of them, else as content."""
    while _HEAD.fullmatch(feed.text):
        if feed.ended:
            calls = _python_calls(feed.text)
            if calls:
                feed.text = ""
            for index, (name, arguments) in enumerate(calls):
                yield CallStart(index, name)
                yield CallArguments(index, arguments)
            break
        yield None
    yield from everything(feed)


def _python_calls(text: str) -> Calls:
    """Names and arguments of `[f(a=1), g(b="x")]`; none if the text is anything else."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in a model's strings
            parsed = ast.parse(text.strip(), mode="eval").body
        if not isinstance(parsed, ast.List):
            return []
        return [_python_call(call) for call in parsed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr) -> tuple[str, str]:
    """Raises ValueError for what is no call with plain values."""
    if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
        raise ValueError("not a call with named arguments")
    arguments = {str(word.arg): ast.literal_eval(_JsonWords().visit(word.value)) for word in call.keywords}
    return _dotted(call.func), dumped(arguments)


def _dotted(name: ast.expr) -> str:
    if isinstance(name, ast.Attribute):
        return f"{_dotted(name.value)}.{name.attr}"
    if not isinstance(name, ast.Name):
        raise ValueError("not a name")
    return name.id


class _JsonWords(ast.NodeTransformer):
    """Templates show lists and objects as JSON, so that models write its words among Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Raises ValueError for other names."""
        if node.id not in _WORDS:
            raise ValueError("a name is no value")
        return ast.copy_location(ast.Constant(_WORDS[node.id]), node)
