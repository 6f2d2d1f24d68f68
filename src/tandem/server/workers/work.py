"""What worker processes do. Only they import this."""

from __future__ import annotations

import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, cast

import msgspec
from pydantic import BaseModel
from pydantic_core import from_json

from tandem.checkpoints.resolve import resolve
from tandem.errors import RequestError, UsageError
from tandem.guided.grammar import grammar_of
from tandem.planner.explain import Named, caveats, commands, plan_json, serve_flags
from tandem.planner.hosts import cluster_of, read_hosts
from tandem.planner.plan import plan
from tandem.planner.presets import planned_files
from tandem.planner.types import Goal, NothingFits, Request
from tandem.protocol.request import StructuredOutputs
from tandem.server.anthropic import schemas as anthropic
from tandem.server.cache.schemas import WarmRequest
from tandem.server.chats.prompt import encode_fitting, rendered
from tandem.server.chats.texts import tokenizer_of
from tandem.server.openai import schemas as openai
from tandem.server.responses import schemas as responses
from tandem.server.validation import parse_bytes
from tandem.server.workers.tasks import FILES_AWAY, Compare, Describe, Encode, Judge, Render, Task

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
            return grammar_of(msgspec.convert(from_json(task.form), StructuredOutputs))
        except ValueError as error:
            raise RequestError(str(error), code="invalid_value") from error
    return _compared(task)


def _packed(tokens: Sequence[int]) -> bytes:
    return array.array("i", tokens).tobytes()


def _compared(task: Compare) -> bytes:
    """The planner's answer as JSON. Raises UsageError."""
    model = planned_files(resolve(task.model, revision=task.revision, weights=False))
    wanted = Request(context=task.context, streams=task.streams, goal=cast("Goal | None", task.goal))
    cluster = cluster_of(read_hosts(task.hosts, None), task.link, description=model.description, request=wanted,
                         fast=False)  # as `tandem plan` does
    machines, notes = cluster.machines, cluster.notes
    try:
        found = plan(model.description, machines, cluster.links, wanted, experts=model.experts)
    except NothingFits as refusal:
        found = refusal.plan
    named = Named(model=task.model, revision=task.revision, hosts=task.hosts)
    layout = None if found.chosen is None else found.chosen.layout
    flags = [] if layout is None else serve_flags(found, wanted, named)
    return msgspec.json.encode({
        **plan_json(found, machines),
        "notes": notes if layout is None else [*notes, *caveats(layout, machines)],
        "layers": model.description.num_layers,
        "serve": None if layout is None else flags,
        "commands": [] if layout is None else commands(layout, flags, machines, named),
    })
