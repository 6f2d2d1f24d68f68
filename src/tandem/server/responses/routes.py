"""Routes of the Responses API: create, retrieve, cancel and delete responses.

A response stored with `store` includes its whole conversation, so it can be continued even if earlier responses are
deleted.
"""

from __future__ import annotations

import logging
import time

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from tandem.errors import NotFoundError, RequestError, TooLargeError, UnavailableError, invalid
from tandem.json_types import JsonObject
from tandem.server.acquire import acquire
from tandem.server.body import outgrown, read_body, translated, understood
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
from tandem.server.responses.schemas import ResponsesRequest, as_parts, implied_type
from tandem.server.responses.translate import NAMES, chat_request
from tandem.server.sse import encode_json, json_response, named_event, streamed
from tandem.server.store.jobs import Job, get_jobs, needs_journal, new_entry
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
        fields, raw = await _in_full(http, fields, raw)
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
    output = OutputItems(Reply(plan, ids), fields.functions, response_id)
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


async def _in_full(http: Request, fields: ResponsesRequest, raw: bytes) -> tuple[ResponsesRequest, bytes]:
    """Return request and body with the conversation of `previous_response_id` before their input, and items in place of
    references to them. Raises RequestError.
    """
    previous = fields.previous_response_id
    references = [(f"input[{n}]", item.id or "") for n, item in enumerate(fields.input) if item.type == "item_reference"]
    if not previous and not references:
        return fields, raw
    if get_jobs(http) is None:
        name, param = ("previous_response_id",) * 2 if previous else ("item_reference", references[0][0])
        raise needs_journal(f"'{name}' needs", "send the whole conversation in 'input'", param)
    limit, past, output = get_api(http).max_body, b"", list[JsonObject]()
    items = await _referenced(http, references, limit)
    if previous:
        past, output = await _past(http, previous)
    whole = await off_loop(len(past) + len(raw) > LARGE or bool(items), _joined, past, output, items, raw)
    if len(whole) > limit:
        raise outgrown("previous_response_id" if previous else "input", limit)
    http.scope.pop("tandem.ignored", None)  # the fields are parsed again
    return await understood(http, whole, ResponsesRequest), whole


async def _referenced(http: Request, references: list[tuple[str, str]], limit: int) -> dict[str, JsonObject]:
    """Return stored items by id. Raises RequestError if one is missing or all together exceed `limit` bytes.

    `references`: place in the request and id of each.
    """
    items, sizes = dict[str, JsonObject](), dict[str, int]()
    for place, name in references:
        if name not in items:
            stored = await background.kept(http, background.response_of(name))
            found = [] if stored is None else (await stored.response(http))["output"]
            if stored is not None and all(item["id"] != name for item in found):
                body = await stored.request()
                found = await off_loop(len(body) > LARGE, _shown, stored.entry, body)
            item = next((item for item in found if item["id"] == name), None)
            if item is None:
                raise NotFoundError(
                    f"Item with id '{name[:100]}' not found. Items are not persisted when 'store' is false, and are kept for "
                    "--journal-keep-hours; send the item itself, or leave it out.",
                    param=place,
                    code="item_not_found",
                )
            items[name], sizes[name] = item, len(encode_json(item))
    if sum(sizes[name] for _, name in references) > limit:
        raise outgrown("input", limit)
    return items


async def _past(http: Request, previous: str) -> tuple[bytes, list[JsonObject]]:
    """Return body and output of the response that a request continues. Raises RequestError."""
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
        raise invalid(
            "previous_response_id",
            f"The previous response '{previous[:100]}' has the status '{response['status']}': only one "
            "that is completed or incomplete can be continued.",
        )
    return await stored.request(), response["output"]


def _joined(past: bytes, output: list[JsonObject], items: dict[str, JsonObject], raw: bytes) -> bytes:
    """Return the body `raw` with the conversation before its input, and `items` (by id) in place of references."""
    body: JsonObject = from_json(raw)
    before = _items(from_json(past)["input"]) if past else []
    fresh = [items[item["id"]] if implied_type(item) == "item_reference" else item for item in _items(body["input"])]
    body["input"] = [*before, *output, *fresh]
    return encode_json(body)


def _items(content: str | list[JsonObject]) -> list[JsonObject]:
    return [{"type": "message", "role": "user", "content": content}] if isinstance(content, str) else content


def _keeps(http: Request, fields: ResponsesRequest) -> bool:
    """Return whether to store the response: by default if there is a journal. Raises RequestError for `store` without one."""
    if fields.store is False or fields.background:
        return False
    if get_jobs(http) is not None or not fields.store:
        return get_jobs(http) is not None
    if get_api(http).settings.server.unknown_fields == "refuse":
        raise needs_journal("'store' needs", "leave it out", "store")
    note_ignored(http, "store")
    return False


async def _keep(http: Request, raw: bytes, answer: Answering) -> None:
    """Store a finished response in the journal; if that fails, clear `answer.stored`."""
    jobs = get_jobs(http)
    assert jobs is not None
    try:
        jobs.check_size(len(raw))
        name = background.job_id(answer.generation.request_id)
        entry = new_entry(name, get_group(http), background.ROUTE, raw, float(answer.created))
        await jobs.write(jobs.journal.keep, entry, raw, answer.last_event())
    except (UnavailableError, TooLargeError) as error:
        logger.warning("a response could not be stored: %s; it says so, and cannot be gone on from", error.message)
        answer.stored = False


def _shown(entry: Entry, body: bytes) -> list[JsonObject]:
    shown = []
    for index, item in enumerate(_items(from_json(body)["input"])):
        kind = implied_type(item)
        fresh = f"{background.response_id(entry).partition('_')[2]}in{index}"
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
