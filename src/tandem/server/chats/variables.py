"""What the chat template is told beside messages and tools, such as whether, and how hard, a model is to think.

Templates differ in what they read: `reasoning_effort` (gpt-oss, Mistral, DeepSeek V4), a switch called
`enable_thinking` (Qwen3, GLM, Gemma 4, SmolLM3) or `thinking` (DeepSeek V3.1, Kimi, Granite), or several of these.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from fastapi import Request

from tandem.errors import RequestError
from tandem.server.context import note_ignored
from tandem.server.openai.schemas import ChatRequest
from tandem.text.tokenizer import Tokenizer

LEVELS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Efforts from the least to the most; `none` is not to think at all."""
_USUAL = frozenset({"low", "medium", "high"})
"""Levels of a template that does not spell out which it knows."""
_SWITCHES = ("enable_thinking", "thinking")
_RESERVED = frozenset(
    {"self", "messages", "conversation", "tools", "tokenize", "add_generation_prompt", "return_dict", "chat_template"}
)


def template_variables(http: Request, fields: ChatRequest, tokenizer: Tokenizer) -> dict[str, Any]:
    """For a chat. Raises RequestError."""
    variables = _template_kwargs(fields)
    if vain := add_thinking(wish_of(fields), tokenizer, variables):
        note_ignored(http, *vain)
    return variables


def _template_kwargs(fields: ChatRequest) -> dict[str, Any]:
    """Variables for the chat template. Also checks that log probabilities are asked for consistently."""
    if fields.top_logprobs is not None and not fields.logprobs:
        raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs", code="invalid_value")
    given = checked_template_kwargs(fields.chat_template_kwargs)
    thinking = fields.enable_thinking
    if thinking is not None and given.setdefault("enable_thinking", thinking) != thinking:
        message = "'enable_thinking' contradicts the one in 'chat_template_kwargs'."
        raise RequestError(message, param="enable_thinking", code="invalid_value")
    return given


def checked_template_kwargs(given: dict[str, Any] | None) -> dict[str, Any]:
    """A copy. Raises RequestError when it would replace what the server itself hands to the template."""
    for name in given or {}:
        if name in _RESERVED:
            raise RequestError(f"'{name}' cannot be set in 'chat_template_kwargs'.", param="chat_template_kwargs")
    return dict(given or {})


@dataclass(frozen=True)
class Wish:
    """What a request asks for; None for what it leaves to the model."""

    effort: str | None
    effort_field: str
    """The field that says so."""
    think: bool | None
    """Said by a switch of the request."""


def wish_of(fields: ChatRequest) -> Wish:
    """What the request asks for. Raises RequestError when its fields contradict each other."""
    reasoning = fields.reasoning
    efforts = {"reasoning_effort": fields.reasoning_effort, "reasoning.effort": reasoning and reasoning.effort}
    thinking = fields.thinking and fields.thinking.type
    switches = {
        "enable_thinking": fields.enable_thinking,
        "thinking.type": None if thinking in (None, "auto") else thinking != "disabled",
        "reasoning.enabled": reasoning and reasoning.enabled,
    }
    effort_field, effort = _only("reasoning_effort", efforts)
    return Wish(effort, effort_field, _only("enable_thinking", switches)[1])


def _only(default: str, said: dict[str, Any]) -> tuple[str, Any]:
    """The field that says something, and what. Raises RequestError when two say different things."""
    given = [(name, value) for name, value in said.items() if value is not None]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise RequestError(f"'{name}' contradicts '{given[0][0]}'; give one of them.", param=name,
                               code="invalid_value")
    return given[0] if given else (default, None)


def add_thinking(wish: Wish, tokenizer: Tokenizer, variables: dict[str, Any]) -> list[str]:
    """Add what the template reads to its `variables`; what stands there already counts more.

    Returns the fields that have no effect with this template.
    """
    reads = tokenizer.template_reads
    think = wish.think if wish.think is not None or wish.effort is None else wish.effort != "none"
    switches = [name for name in _SWITCHES if name in reads]
    if think is not None:
        for name in switches:
            variables.setdefault(name, think)
    if wish.effort is None:
        return []
    if "reasoning_effort" in reads:
        if level := nearest(wish.effort, tokenizer.template_words, switched=bool(switches)):
            variables.setdefault("reasoning_effort", level)
    elif not switches:
        return [wish.effort_field]
    return []


def nearest(effort: str, words: Collection[str], *, switched: bool) -> str | None:
    """The level closest to `effort` of those that a template spells out; of two as close the higher.

    None for no thinking where a switch says so and the template has no word for it.
    """
    told = {level for level in LEVELS if level in words}
    levels = told if len(told) > 1 else _USUAL
    if effort == "none":
        if "none" in levels:
            return "none"
        if switched:
            return None
    place = LEVELS.index(effort)
    return min((level for level in LEVELS if level in levels - {"none"}),
               key=lambda level: (abs(LEVELS.index(level) - place), -LEVELS.index(level)))
