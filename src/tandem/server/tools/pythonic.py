"""Format of LFM2 and Llama 4: a Python list of calls with named arguments, between tokens or as the whole answer."""

from __future__ import annotations

import ast
import re
import warnings

from tandem.server.tools.json_calls import llama3
from tandem.server.tools.json_text import Calls, called, complete_calls, dumped, whole_calls
from tandem.server.tools.scan import Feed, Steps, everything, next_visible

TAGS = {"<|tool_call_start|>": "<|tool_call_end|>", "<|python_start|>": "<|python_end|>"}
"""Opening and closing token of LFM2, and of Llama 4."""
SIGNS = (("<|tool_call_start|>",), ("<|tool_list_start|>",), ("<|python_start|>",), ("<|header_start|>",))
"""Template texts; each identifies LFM2 or Llama 4."""
_HEAD = re.compile(r"\[\s*(?:[A-Za-z_](?:[\w.-]*\s*(?:\(.*)?)?)?", re.DOTALL)
_WORDS = {"true": "True", "false": "False", "null": "None"}
"""Python words by JSON word: models mix both, as templates show lists and objects as JSON."""
_PART = re.compile(r"""(?s)("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|([A-Za-z_][\w.-]*)(?=\s*[(=])|\b(true|false|null)\b""")
"""A string, a name before `(` or `=`, or a JSON word."""


def pythonic(feed: Feed) -> Steps[None]:
    """Read content and calls between tokens, or an answer that is only calls, also in Llama's JSON."""
    first = yield from next_visible(feed)
    if first == "{":
        yield from llama3(feed)
    elif first == "[":
        yield from _bare(feed)
    yield from complete_calls(feed, TAGS, lambda body: _python_calls(body) or whole_calls(body))


def _bare(feed: Feed) -> Steps[None]:
    """Read a whole answer that begins with a bracket: as calls if it is a list of calls, else as content."""
    while _HEAD.fullmatch(feed.text):
        if feed.ended:
            calls = _python_calls(feed.text)
            if calls:
                feed.text = ""
            yield from called(calls, 0)
            break
        yield None
    yield from everything(feed)


def _python_calls(text: str) -> Calls:
    """Return the calls in text such as `[f(a=1), g(b="x")]`; empty for anything else."""
    names: list[str] = []

    def plain(part: re.Match[str]) -> str:
        """Replace a name by a placeholder, as names may be Python keywords or have dashes and dots."""
        if part[2]:
            names.append(part[2])
            return f"n{len(names) - 1}"
        return _WORDS.get(part[0], part[0])

    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes in a model's strings
            parsed = ast.parse(_PART.sub(plain, text.strip()), mode="eval").body
        if not isinstance(parsed, ast.List):
            return []
        return [_python_call(call, names) for call in parsed.elts]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return []


def _python_call(call: ast.expr, names: list[str]) -> tuple[str, str]:
    """Return name and arguments of a call. Raises ValueError unless all values are literals."""
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name):
        raise ValueError("not a call with named arguments")
    arguments = {names[int(word.arg[1:])]: ast.literal_eval(word.value) for word in call.keywords if word.arg}
    if len(arguments) < len(call.keywords):
        raise ValueError("not a call with named arguments")
    return names[int(call.func.id[1:])], dumped(arguments)
