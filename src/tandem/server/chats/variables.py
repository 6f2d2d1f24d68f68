"""What the chat template is told beside messages and tools."""

from __future__ import annotations

from typing import Any

from fastapi import Request

from tandem.errors import RequestError
from tandem.server.chats.thinking import add_thinking, wish_of
from tandem.server.fields.ignored import note_ignored
from tandem.server.openai.schemas import ChatRequest
from tandem.text.tokenizer import Tokenizer

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
