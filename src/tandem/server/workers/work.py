"""Functions that run in sandboxed worker processes; imported only there."""

from __future__ import annotations

import array
from collections.abc import Sequence
from functools import lru_cache

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
from tandem.protocol.pictures import Picture
from tandem.protocol.request import StructuredOutputs
from tandem.server.anthropic import schemas as anthropic
from tandem.server.body_validation import parse_bytes
from tandem.server.cache import schemas as cache
from tandem.server.chats.prompt import END, Marks, prompt_text, rendered
from tandem.server.chats.texts import FILES_AWAY, TextsOf, tokenizer_of
from tandem.server.fields import Unknown
from tandem.server.ollama import requests as ollama
from tandem.server.openai import schemas as openai
from tandem.server.responses import schemas as responses
from tandem.text.pictures import Prepared, processor_of, tokens_with_pictures
from tandem.text.tokenizer import encode_fitting

_SCHEMAS: dict[str, type[BaseModel]] = {
    name: schema
    for module in (anthropic, cache, ollama, openai, responses)
    for name, schema in vars(module).items()
    if name.endswith("Request")
}
"""Schemas of bodies by name."""
_tokenizer = lru_cache(maxsize=2)(tokenizer_of)


def load(model: TextsOf, pictures: Sequence[object] = (), **_: object) -> None:
    """Load and cache the model's tokenizer and, for `pictures`, their processor, before the task's memory limit applies. Raises
    RequestError."""
    try:
        _tokenizer(model)
    except UsageError as error:
        raise RequestError(error.message, code=FILES_AWAY) from error
    if pictures:
        processor_of(model.source)


def judge(schema: str, body: bytes, unknown: Unknown) -> None:
    """Validate `body` against the schema named `schema`. `unknown`: value of --unknown-fields. Raises RequestError."""
    parse_bytes(body, _SCHEMAS[schema], unknown)


def encode(model: TextsOf, texts: list[str], context: int, param: str, special: bool, closed: bool) -> list[bytes]:
    """Return the token ids of each text as int32 bytes. Raises RequestError like `encode_fitting`."""
    tokenizer = _tokenizer(model)
    return [_packed(encode_fitting(tokenizer, text, context, param, special=special, closed=closed)) for text in texts]


def render(
    model: TextsOf, context: int, conversation: bytes, mark: str, pictures: list[tuple[str, bool]], known: dict[int, Prepared]
) -> tuple[bytes, str, list[Picture], list[Prepared]]:
    """Return a conversation's prompt as token ids (int32 bytes), the end of its text, its pictures without inputs, and how
    they were prepared. Raises RequestError.

    `conversation`: keyword arguments of `prompt_text` as JSON, since msgpack has no integers above 64 bits. `mark`: text that
    stands for a picture. `pictures`: URL of each, and whether a small one is enough. `known`: those that were prepared before,
    by number.
    """
    given, tokenizer = from_json(conversation), _tokenizer(model)
    if not pictures:
        prompt = rendered(tokenizer, context, given, quick=False)
        return _packed(prompt.tokens), prompt.end, [], []
    processor = processor_of(model.source)
    text = prompt_text(tokenizer, **given, quick=False, marks=Marks(mark, processor.placeholder))
    tokens, seen, prepared = tokens_with_pictures(tokenizer, processor, context, given["messages"], pictures, text, known)
    return _packed(tokens), text[-END:], [msgspec.structs.replace(one, inputs=b"") for one in seen], prepared


def describe_form(form: bytes) -> str:
    """Return the grammar of `form`, a StructuredOutputs object as JSON. Raises RequestError."""
    try:
        return grammar_of(msgspec.convert(from_json(form), StructuredOutputs))
    except ValueError as error:
        raise RequestError(str(error), code="invalid_value") from error


def _packed(tokens: Sequence[int]) -> bytes:
    return array.array("i", tokens).tobytes()


def compare(
    model: str, revision: str | None, hosts: list[str], link: list[str], context: int, streams: int, goal: Goal | None
) -> bytes:
    """Return the planner's comparison of layouts of a model over `hosts` as a JSON object. Raises UsageError."""
    planned = planned_files(resolve(model, revision=revision, weights=False))
    wanted = Request(context=context, streams=streams, goal=goal)
    cluster = cluster_of(
        read_hosts(hosts, None), link, description=planned.description, request=wanted, fast=False
    )  # as `tandem plan` does
    machines, notes = cluster.machines, cluster.notes
    try:
        comparison = plan(planned.description, machines, cluster.links, wanted, experts=planned.experts)
    except NothingFits as refusal:
        comparison = refusal.plan
    named = Named(model=model, revision=revision, hosts=hosts)
    layout = None if comparison.chosen is None else comparison.chosen.layout
    flags = [] if layout is None else serve_flags(comparison, wanted, named)
    return msgspec.json.encode(
        {
            **plan_json(comparison, machines),
            "notes": notes if layout is None else [*notes, *caveats(layout, machines)],
            "layers": planned.description.num_layers,
            "serve": None if layout is None else flags,
            "commands": [] if layout is None else commands(layout, flags, machines, named),
        }
    )
