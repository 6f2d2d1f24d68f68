"""Conversations that the server keeps: responses with `store` in the journal, and those that go on from them.

What is kept of a response holds all of its conversation: whoever goes on from it needs no more, whatever has become of
the responses before it.
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

from fastapi import Request
from pydantic_core import from_json

from tandem.errors import RequestError, UnavailableError
from tandem.server.body import understood
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api, get_group
from tandem.server.fields.ignored import note_ignored
from tandem.server.journal.jobs import get_jobs, request_digest
from tandem.server.journal.journal import Entry
from tandem.server.lists import page
from tandem.server.responses import background
from tandem.server.responses.answering import Answering
from tandem.server.responses.schemas import ResponsesRequest, as_parts
from tandem.server.sse import encode_json

logger = logging.getLogger(__name__)
Json = dict[str, Any]


async def with_past(http: Request, fields: ResponsesRequest, raw: bytes) -> tuple[ResponsesRequest, bytes]:
    """The request with the conversation of `previous_response_id` before its own input. Raises RequestError."""
    previous = fields.previous_response_id
    if not previous:
        return fields, raw
    if get_jobs(http) is None:
        raise _needs_journal("previous_response_id", "send the whole conversation in 'input'")
    stored = await background.kept(http, previous)
    if stored is None:
        raise RequestError(f"Previous response with id '{previous[:100]}' not found; only responses with 'store' or "
                           "'background' true are kept, for --journal-keep-hours.", param="previous_response_id",
                           code="previous_response_not_found")
    response = await stored.response(http)
    if response["status"] not in ("completed", "incomplete"):
        raise RequestError(f"The previous response '{previous[:100]}' has the status '{response['status']}': only one "
                           "that is completed or incomplete can be continued.", param="previous_response_id",
                           code="invalid_value")
    past = await stored.jobs.request(stored.entry)
    large = len(past) + len(raw) > LARGE
    whole = await off_loop(large, _joined, past, response["output"], raw)
    limit = get_api(http).max_body
    if len(whole) > limit:
        raise RequestError(f"The conversation has become larger than the limit of {limit} bytes (--max-body-mb).",
                           param="previous_response_id", code="context_length_exceeded")
    http.scope.pop("tandem.ignored", None)  # its fields are read once more
    return await understood(http, whole, ResponsesRequest), whole


def _joined(past: bytes, output: list[Json], raw: bytes) -> bytes:
    body: Json = from_json(raw)
    body["input"] = [*_items(from_json(past)["input"]), *output, *_items(body["input"])]
    return encode_json(body)


def _items(given: str | list[Json]) -> list[Json]:
    return [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given


def keeps(http: Request, fields: ResponsesRequest) -> bool:
    """Whether the response is to be kept. Raises RequestError when it cannot be."""
    if not fields.store or fields.background:
        return False
    if get_jobs(http) is not None:
        return True
    if get_api(http).settings.server.unknown_fields == "refuse":
        raise _needs_journal("store", "leave it out")
    note_ignored(http, "store")
    return False


def _needs_journal(param: str, other: str) -> RequestError:
    message = f"'{param}' needs a journal: start the server with --journal DIR (docs/journal.md), or {other}."
    return RequestError(message, param=param, code="unsupported_parameter")


async def keep(http: Request, raw: bytes, answer: Answering) -> None:
    """Write a response that is over into the journal; where that fails, the response says that it is not stored."""
    jobs = get_jobs(http)
    assert jobs is not None
    try:
        entry = Entry(0, background.job_id(answer.generation.request_id), get_group(http), "",
                      request_digest(background.ROUTE, raw), background.ROUTE, float(answer.created), 0)
        await jobs.keep(entry, raw, answer.last_event())
    except UnavailableError as error:
        logger.warning("a response could not be stored: %s; it says so, and cannot be gone on from", error.message)
        answer.stored = False


async def input_items(http: Request, response_id: str) -> Json:
    """A page of the items that a kept response was made from, the latest first. Raises RequestError."""
    stored = await background.find(http, response_id)
    body = await stored.jobs.request(stored.entry)
    items = await off_loop(len(body) > LARGE, _shown, stored.entry, body)
    return page(items, http, newest_first=True)


def _shown(entry: Entry, body: bytes) -> list[Json]:
    shown = []
    for index, item in enumerate(_items(from_json(body)["input"])):
        kind = item.get("type") or "message"
        fresh = hashlib.blake2b(f"{entry.id}:in:{index}".encode(), digest_size=16).hexdigest()
        whole = {"type": kind, "id": item.get("id") or f"{'msg' if kind == 'message' else 'item'}_{fresh}",
                 "status": "completed", **{name: value for name, value in item.items() if value is not None}}
        if kind == "message":
            whole["content"] = as_parts(whole["content"])
        shown.append(whole)
    return shown
