"""Routes of the Responses API: create, retrieve, cancel and delete responses.

A response stored with `store` includes its whole conversation, so it can be continued even if earlier responses are
deleted.
"""

from __future__ import annotations

import hashlib
import logging
import time

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from tandem.errors import RequestError, UnavailableError
from tandem.json_types import JsonObject
from tandem.server.acquire import acquire
from tandem.server.body import read_body, translated, understood
from tandem.server.body_validation import in_words
from tandem.server.chats.answer_message import Reply
from tandem.server.chats.plan import start_chat
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import get_api, get_group, new_id, note_ignored
from tandem.server.engines.served_model import Served
from tandem.server.lists import page
from tandem.server.openapi import documented
from tandem.server.responses import background
from tandem.server.responses.answering import Answering, OutputItems, error_event
from tandem.server.responses.schemas import ResponsesRequest, as_parts
from tandem.server.responses.translate import NAMES, chat_request
from tandem.server.sse import encode_json, json_response, named_event, streamed
from tandem.server.store.jobs import Job, get_jobs, request_digest
from tandem.server.store.journal import Entry

logger = logging.getLogger(__name__)
router = APIRouter()
_STREAMS = {"responses": {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}}


@router.post("/v1/responses", openapi_extra=documented(ResponsesRequest, streams=True))
async def responses(http: Request) -> Response:
    """Create a response: in one piece, as a stream, or in the background."""
    raw = await read_body(http, get_api(http).max_body)
    job: Job | None = http.scope.get("tandem.job")
    get_api(http).quotas.enter(http.scope)
    fields = await understood(http, raw, ResponsesRequest)
    kept = None
    if job is None:  # a job's body includes the earlier conversation
        stores = _keeps(http, fields)
        fields, raw = await _with_past(http, fields, raw)
        kept = raw if stores else None
    if job is None and fields.background:
        return await background.accept(http, fields, raw)
    served = await acquire(
        http,
        fields.model,
        stream=fields.stream and job is None,
        error=lambda error: named_event({**error_event(error), "sequence_number": 0}),
    )
    answer = await _start(http, served, fields, job)
    if kept is not None:
        answer.keep = lambda: _keep(http, kept, answer)
    if job is not None:
        return await background.work(job, answer)
    if fields.stream:
        return await streamed(answer.generation, answer)
    return await answer.whole((await answer.generation.collect())[0])


async def _start(http: Request, served: Served, fields: ResponsesRequest, job: Job | None) -> Answering:
    """Submit the request. The response of a `job` keeps its id and creation time after a restart. Raises RequestError."""
    ids = background.Ids(job.entry.id) if job is not None else None
    response_id = background.response_id(job.entry) if job is not None else new_id("resp", "_")
    created = time.time() if job is None else job.entry.created
    with in_words(NAMES):
        chat = await translated(http, lambda: chat_request(fields))
        plan, generation = await start_chat(http, served, chat, response_id)
    if hosted := [f"tools.{tool.name}" for tool in fields.tools or () if tool.hosted]:
        note_ignored(http, *hosted)
    output = OutputItems(Reply(plan, ids), fields.functions, ids)
    return Answering(fields, generation, generation.model, output, int(created))


@router.get("/v1/responses/{response_id}", openapi_extra=_STREAMS)
async def retrieve(http: Request, response_id: str) -> Response:
    """Return a stored response, or, with `stream`, its events after number `starting_after`."""
    stored = await background.find(http, response_id)
    after = background.wanted_events(http)
    return json_response(await stored.response(http)) if after is None else stored.stream(http, after)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(http: Request, response_id: str) -> Response:
    """Cancel a background response; a finished one is returned unchanged."""
    stored = await background.find(http, response_id)
    await stored.cancel()
    return json_response(await stored.response(http))


@router.delete("/v1/responses/{response_id}")
async def delete(http: Request, response_id: str) -> Response:
    """Cancel a response if it runs, and delete it."""
    await (await background.find(http, response_id)).forget()
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(http: Request, response_id: str) -> Response:
    """List the input items of a stored response, including the earlier conversation, in pages."""
    stored = await background.find(http, response_id)
    body = await stored.request()
    items = await off_loop(len(body) > LARGE, _shown, stored.entry, body)
    return json_response(page(items, http, newest_first=True))


async def _with_past(http: Request, fields: ResponsesRequest, raw: bytes) -> tuple[ResponsesRequest, bytes]:
    """Return request and body with the conversation of `previous_response_id` before their input. Raises RequestError."""
    previous = fields.previous_response_id
    if not previous:
        return fields, raw
    if get_jobs(http) is None:
        raise _needs_journal("previous_response_id", "send the whole conversation in 'input'")
    stored = await background.kept(http, previous)
    if stored is None:
        raise RequestError(
            f"Previous response with id '{previous[:100]}' not found; only responses with 'store' or "
            "'background' true are kept, for --journal-keep-hours.",
            param="previous_response_id",
            code="previous_response_not_found",
        )
    response = await stored.response(http)
    if response["status"] not in ("completed", "incomplete"):
        raise RequestError(
            f"The previous response '{previous[:100]}' has the status '{response['status']}': only one "
            "that is completed or incomplete can be continued.",
            param="previous_response_id",
            code="invalid_value",
        )
    past = await stored.request()
    large = len(past) + len(raw) > LARGE
    whole = await off_loop(large, _joined, past, response["output"], raw)
    limit = get_api(http).max_body
    if len(whole) > limit:
        raise RequestError(
            f"The conversation has become larger than the limit of {limit} bytes (--max-body-mb).",
            param="previous_response_id",
            code="context_length_exceeded",
        )
    http.scope.pop("tandem.ignored", None)  # the fields are parsed again
    return await understood(http, whole, ResponsesRequest), whole


def _joined(past: bytes, output: list[JsonObject], raw: bytes) -> bytes:
    body: JsonObject = from_json(raw)
    body["input"] = [*_items(from_json(past)["input"]), *output, *_items(body["input"])]
    return encode_json(body)


def _items(content: str | list[JsonObject]) -> list[JsonObject]:
    return [{"type": "message", "role": "user", "content": content}] if isinstance(content, str) else content


def _keeps(http: Request, fields: ResponsesRequest) -> bool:
    """Return whether to store the response (`store`). Raises RequestError without a journal."""
    if not fields.store or fields.background:
        return False
    if get_jobs(http) is not None:
        return True
    if get_api(http).settings.server.unknown_fields == "refuse":
        raise _needs_journal("store", "leave it out")
    note_ignored(http, "store")
    return False


def _needs_journal(param: str, other: str) -> RequestError:
    message = f"'{param}' needs a journal: start the server with --journal DIR (docs/background-work.md), or {other}."
    return RequestError(message, param=param, code="unsupported_parameter")


async def _keep(http: Request, raw: bytes, answer: Answering) -> None:
    """Store a finished response in the journal; if that fails, clear `answer.stored`."""
    jobs = get_jobs(http)
    assert jobs is not None
    try:
        entry = Entry(
            0,
            background.job_id(answer.generation.request_id),
            get_group(http),
            "",
            request_digest(background.ROUTE, raw),
            background.ROUTE,
            float(answer.created),
            0,
        )
        await jobs.write(jobs.journal.keep, entry, raw, answer.last_event())
    except UnavailableError as error:
        logger.warning("a response could not be stored: %s; it says so, and cannot be gone on from", error.message)
        answer.stored = False


def _shown(entry: Entry, body: bytes) -> list[JsonObject]:
    shown = []
    for index, item in enumerate(_items(from_json(body)["input"])):
        kind = item.get("type") or "message"
        fresh = hashlib.blake2b(f"{entry.id}:in:{index}".encode(), digest_size=16).hexdigest()
        whole = {
            "type": kind,
            "id": item.get("id") or f"{'msg' if kind == 'message' else 'item'}_{fresh}",
            "status": "completed",
            **{name: value for name, value in item.items() if value is not None},
        }
        if kind == "message":
            whole["content"] = as_parts(whole["content"])
        shown.append(whole)
    return shown
