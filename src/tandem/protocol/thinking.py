"""Budgets of thinking: what a sequence's tokens so far say of its reasoning, and what may come next. Pure.

Everything follows from the tokens, so that it is the same in each layout, in any batch, with drafts and after a replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

OPENING = 8
"""Where reasoning stands at the beginning alone: most output tokens up to the end of its opening tag."""
SOFT = 256
"""Most tokens before the limit at which a likely closing token is taken."""


class ThinkingTokens(Struct, frozen=True, omit_defaults=True):
    """The tokens around a model's reasoning."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    ends: tuple[int, ...] = ()
    """Tokens that end reasoning too, such as the one that begins a tool call."""
    begun: bool = False
    """True if the prompt ends with the opening tag."""
    again: bool = False
    """True if there may be reasoning in several places, false if at the beginning of the answer alone."""


class ThinkingBudget(Struct, frozen=True, omit_defaults=True):
    """Most tokens of reasoning in one answer."""

    limit: int
    """Tokens after the opening tag; >= 0. At this number the closing tag is forced."""
    tokens: ThinkingTokens
    message: tuple[int, ...] = ()
    """Forced before the closing tag. These tokens come on top of the limit."""


class Thought(NamedTuple):
    """State of a sequence's reasoning after some of its output."""

    thinking: bool
    spent: int = 0
    """Reasoning tokens so far, without the tags."""
    closed: bool = False
    """True once reasoning has ended."""
    produced: int = 0
    """Output tokens so far."""
    tail: tuple[int, ...] = ()
    """The latest tokens, as many as a tag has."""


class Ruling(NamedTuple):
    """What a budget says of the next token."""

    token: int
    how: str
    """force: no other token; likely: no other token where this one is likely; ban: any other token."""


def begin(tags: ThinkingTokens) -> Thought:
    """Return the state before any output."""
    return Thought(tags.begun)


def follow(tags: ThinkingTokens, thought: Thought, tokens: Iterable[int]) -> Thought:
    """Return the state after more output."""
    longest = max(len(tags.opening), len(tags.closing))
    thinking, spent, closed, produced, tail = thought
    for token in tokens:
        produced += 1
        tail = (*tail, token)[-longest:]
        if thinking:
            if tail[-len(tags.closing) :] == tags.closing:
                thinking, closed, spent, tail = False, True, spent - len(tags.closing) + 1, ()
            elif token in tags.ends:
                thinking, closed, tail = False, True, ()
            else:
                spent += 1
        elif tail[-len(tags.opening) :] == tags.opening and (tags.again or (not closed and produced <= OPENING)):
            thinking, tail = True, ()
    return Thought(thinking, max(spent, 0), closed, produced, tail)


def ruling(budget: ThinkingBudget, thought: Thought) -> Ruling | None:
    """Return what the budget says of the token that comes next; None if nothing."""
    tags, over = budget.tokens, thought.spent - budget.limit
    if thought.thinking:
        matched = _matched(thought.tail, tags.closing)
        if over >= 0:
            # Said whole or not at all: a grammar may forbid its first token while a character is not ended.
            begun = not over or thought.tail[-1:] == budget.message[over - 1 : over]
            message = begun and not matched and over < len(budget.message)
            return Ruling(budget.message[over] if message else tags.closing[matched], "force")
        return Ruling(tags.closing[0], "likely") if not matched and -over <= _soft(budget) else None
    if thought.closed and over >= 0:
        # A tag of several tokens begins with one that begins other things, too.
        place = min(1, len(tags.opening) - 1)
        if thought.tail[len(thought.tail) - place :] == tags.opening[:place]:
            return Ruling(tags.opening[place], "ban")
    return None


def free_for(budget: ThinkingBudget, thought: Thought) -> float:
    """Return the number of tokens that can come before `ruling` says anything that depends on them."""
    tags, over = budget.tokens, thought.spent - budget.limit
    if not thought.thinking and thought.closed and over >= 0:
        return math.inf if len(tags.opening) == 1 else 0  # one token is banned for good
    if not thought.thinking and not tags.again and (thought.closed or thought.produced >= OPENING):
        return math.inf
    return max(0, -over - _soft(budget))


def _soft(budget: ThinkingBudget) -> int:
    return min(budget.limit // 10, SOFT)


def _matched(tail: tuple[int, ...], tag: tuple[int, ...]) -> int:
    """Return how many tokens of `tag` the tail ends with already."""
    return next((n for n in range(min(len(tail), len(tag) - 1), 0, -1) if tail[-n:] == tag[:n]), 0)
