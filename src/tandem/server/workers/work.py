"""What worker processes do. Only they import this."""

from __future__ import annotations

import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic_core import from_json

from tandem.errors import RequestError, UsageError
from tandem.guided.grammar import grammar_of
from tandem.protocol.request import StructuredOutputs
from tandem.server.anthropic import schemas as anthropic
from tandem.server.cache.schemas import WarmRequest
from tandem.server.chats.fitting import encode_fitting
from tandem.server.chats.prompt import rendered
from tandem.server.chats.texts import tokenizer_of
from tandem.server.openai import schemas as openai
from tandem.server.responses import schemas as responses
from tandem.server.validation import parse_bytes
from tandem.server.workers.tasks import FILES_AWAY, Describe, Encode, Judge, Render, Task

_SCHEMAS: dict[str, type[BaseModel]] = {
    model.__name__: model
    for model in (openai.ChatRequest, openai.CompletionRequest, openai.EmbeddingRequest, openai.TokenizeRequest,
                  openai.DetokenizeRequest, anthropic.MessagesRequest, anthropic.CountRequest,
                  responses.ResponsesRequest, WarmRequest)
}
"""Every body that is judged here, by the name of its schema."""
_tokenizer = lru_cache(maxsize=2)(tokenizer_of)


def prepare(task: Task) -> None:
    """Load what the model needs, whatever memory that takes: it is none of the client's. Raises RequestError."""
    if isinstance(task, Encode | Render):
        try:
            _tokenizer(task.model)
        except UsageError as error:
            raise RequestError(error.message, code=FILES_AWAY) from error


def answer(task: Task) -> Any:
    """The answer to a task. Raises RequestError, UsageError."""
    if isinstance(task, Judge):
        parse_bytes(task.body, _SCHEMAS[task.route], task.unknown)
        return None
    if isinstance(task, Encode):
        tokenizer = _tokenizer(task.model)
        return [_packed(encode_fitting(tokenizer, text, task.context, task.param, special=task.special,
                                       closed=task.closed)) for text in task.texts]
    if isinstance(task, Render):
        tokens, end = rendered(_tokenizer(task.model), task.context, from_json(task.conversation), quick=False)
        return _packed(tokens), end
    if isinstance(task, Describe):
        try:
            return grammar_of(_form(from_json(task.form)))
        except ValueError as error:
            raise RequestError(str(error), code="invalid_value") from error
    from tandem.server.workers.comparing import compared

    return compared(task)


def _form(fields: dict[str, Any]) -> StructuredOutputs:
    return msgspec.convert(fields, StructuredOutputs)


def _packed(tokens: Sequence[int]) -> bytes:
    return array.array("i", tokens).tobytes()
