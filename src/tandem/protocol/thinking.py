"""Thinking budgets: the state of a sequence's reasoning, and constraints on its next token. Pure functions.

All follows from the tokens alone, so results are equal in every layout and batch, with drafts and after a replay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

OPENING = 8
"""Maximum output tokens up to the end of the opening tag, for models that reason only at the beginning."""
SOFT = 256
"""Maximum distance in tokens before the limit from which a likely closing token is taken."""


class ThinkingTokens(Struct, frozen=True, omit_defaults=True):
    """Token ids of the tags around a model's reasoning."""

    opening: tuple[int, ...]
    closing: tuple[int, ...]
    ends: tuple[int, ...] = ()
    """Other tokens that end reasoning, such as the start of a tool call."""
    begun: bool = False
    """True if the prompt ends with the opening tag."""
    again: bool = False
    """True if reasoning may occur several times; False if only at the beginning of the answer."""


class ThinkingBudget(Struct, frozen=True, omit_defaults=True):
    """Limit on the reasoning tokens of one answer."""

    limit: int
    """Maximum tokens after the opening tag, >= 0. The closing tag is then forced."""
    tokens: ThinkingTokens
    message: tuple[int, ...] = ()
    """Tokens forced before the closing tag, beyond the limit."""


class Thought(NamedTuple):
    """State of a sequence's reasoning after some of its output."""

    thinking: bool
    spent: int = 0
    """Reasoning tokens so far, without tags."""
    closed: bool = False
    """True once reasoning has ended."""
    produced: int = 0
    """Output tokens so far."""
    tail: tuple[int, ...] = ()
    """Latest output tokens, at most as many as the longest tag has."""


class Ruling(NamedTuple):
    """Constraint of a budget on the next token."""

    token: int
    how: str
    """`force`: only this token; `likely`: this token, if it is likely; `ban`: any other token."""


def begin(tags: ThinkingTokens) -> Thought:
    """Return the state before any output token."""
    return Thought(tags.begun)


def follow(tags: ThinkingTokens, thought: Thought, tokens: Iterable[int]) -> Thought:
    """Return the state after appending `tokens`."""
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
    """Return the constraint on the next token; None if there is none."""
    tags, over = budget.tokens, thought.spent - budget.limit
    if thought.thinking:
        matched = _matched(thought.tail, tags.closing)
        if over >= 0:
            # The message is forced whole or not at all: a grammar may forbid its first token within a character.
            begun = not over or thought.tail[-1:] == budget.message[over - 1 : over]
            message = begun and not matched and over < len(budget.message)
            return Ruling(budget.message[over] if message else tags.closing[matched], "force")
        return Ruling(tags.closing[0], "likely") if not matched and -over <= _soft(budget) else None
    if thought.closed and over >= 0:
        # A multi-token tag starts with a token that other text may use too, so ban its second token.
        place = min(1, len(tags.opening) - 1)
        if thought.tail[len(thought.tail) - place :] == tags.opening[:place]:
            return Ruling(tags.opening[place], "ban")
    return None


def free_for(budget: ThinkingBudget, thought: Thought) -> float:
    """Return the number of tokens that can follow before `ruling` depends on them."""
    tags, over = budget.tokens, thought.spent - budget.limit
    if not thought.thinking and thought.closed and over >= 0:
        return math.inf if len(tags.opening) == 1 else 0  # a one-token tag is banned permanently
    if not thought.thinking and not tags.again and (thought.closed or thought.produced >= OPENING):
        return math.inf
    return max(0, -over - _soft(budget))


def _soft(budget: ThinkingBudget) -> int:
    return min(budget.limit // 10, SOFT)


def _matched(tail: tuple[int, ...], tag: tuple[int, ...]) -> int:
    """Return the number of leading tokens of `tag` that `tail` ends with."""
    return next((n for n in range(min(len(tail), len(tag) - 1), 0, -1) if tail[-n:] == tag[:n]), 0)
