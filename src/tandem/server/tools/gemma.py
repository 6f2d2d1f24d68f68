"""Gemma's format: `call:name{key:value,...}` between special tokens, with special tokens as string quotes."""

from __future__ import annotations

import re

from tandem.server.tools.json_text import Calls, complete_calls, dumped, loads
from tandem.server.tools.scan import Feed, Steps

TAGS = {"<|tool_call>": "<tool_call|>", "<start_function_call>": "<end_function_call>"}
"""Opening and closing token of Gemma 4, and of FunctionGemma."""
QUOTES = ('<|"|>', "<escape>")
_CALL = re.compile(r"\s*call:([\w.-]+)\s*(\{.*\})\s*", re.DOTALL)
_PART = re.compile(r"""(?s)<\|"\|>(.*?)<\|"\|>|<escape>(.*?)<escape>|("(?:[^"\\]|\\.)*")(?=\s*[:,}\]])|"""
                   r"""(?<=[{,])\s*([^:{}\[\],\s"]+)\s*:|([^\s{}\[\],:][^{}\[\],]*)""")  # fmt: skip
"""A string between either token or in quotes, a key without quotes and its colon, or a value without quotes."""


def gemma(feed: Feed) -> Steps[None]:
    """Read content and calls."""
    yield from complete_calls(feed, TAGS, _calls)


def _calls(body: str) -> Calls:
    """Return the call in `body` as a list of one; empty for other text."""
    try:
        call = _CALL.fullmatch(body)
        return [(call[1], dumped(loads(_PART.sub(_as_json, call[2]))))] if call else []
    except (ValueError, RecursionError):
        return []


def _as_json(part: re.Match[str]) -> str:
    """Return a match of `_PART` as JSON. Raises ValueError for an unterminated string, NaN or infinity."""
    first, second, quoted, key, bare = part.groups()
    if bare is None:
        string = key if first is second is None else first or second or ""
        return quoted or dumped(string) + (":" if key else "")
    if any(quote in bare for quote in QUOTES):
        raise ValueError("a string without an end")
    try:
        value = loads(bare.strip())
    except ValueError:
        value = bare.strip()
    return dumped(value)
