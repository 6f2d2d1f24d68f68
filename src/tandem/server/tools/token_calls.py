"""Format of DeepSeek V3, R1, V3.1 and Kimi K2: calls between special tokens, another one between name and arguments."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tandem.server.tools.deltas import CallArguments, CallStart, Content
from tandem.server.tools.json_text import json_object
from tandem.server.tools.scan import Feed, Steps, held, next_visible, passed_on

_BODY = re.compile(r"\s*(?:([^\s`{]+)\s*(?=```))?(?:```(?:json)?\s*)?(?=\{)")
_NAME = re.compile(r"\s*((?:functions\.)?([\w./-]+)(:\d+)?)\s*")


@dataclass(frozen=True)
class Tokens:
    """Special tokens of one family: around all calls, around one call, and between name and arguments."""

    all: str
    one: str
    separator: str
    one_end: str
    all_end: str


DEEPSEEK = Tokens("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
                  "<｜tool▁calls▁end｜>")  # fmt: skip
KIMI = Tokens("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
              "<|tool_call_end|>", "<|tool_calls_section_end|>")  # fmt: skip


def token_calls(feed: Feed, tokens: Tokens) -> Steps[None]:
    """Read content and calls, with or without the section's tokens.

    A call is `name SEPARATOR {}` (V3.1), `function SEPARATOR name ```json {} ``` ` (V3) or, with Kimi's numbered id,
    `functions.name:0 SEPARATOR {}`.
    """
    index = 0
    while marker := (yield from passed_on(feed, (tokens.all, tokens.all_end, tokens.one))):
        if marker == tokens.one:
            index = yield from _call(feed, index, tokens)
        if index or marker == tokens.all:
            yield from next_visible(feed)


def _call(feed: Feed, index: int, tokens: Tokens) -> Steps[int]:
    before, marker = yield from held(feed, (tokens.separator, tokens.one_end))
    while marker == tokens.separator:
        end = feed.text.find(tokens.one_end)
        body = _BODY.match(feed.text, 0, end if end >= 0 else len(feed.text))
        complete = end >= 0 or feed.ended
        empty = complete and not feed.text[: end if end >= 0 else None].strip()
        if (body or empty) and (name := _NAME.fullmatch((body and body[1]) or before)):
            yield CallStart(index, name[2], name[1] if name[3] else "")
            if body:
                feed.take(body.end())
                yield from json_object(feed, index)
            else:
                yield CallArguments(index, "{}")
            yield from held(feed, (tokens.one_end,))
            return index + 1
        if body or complete:
            break
        yield None
    yield Content(tokens.one + before + marker)
    return index
