"""POST /v1/responses; asking for those that are kept, stopping them and having them forgotten."""

from __future__ import annotations

import time
import uuid

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.server.body import read_body, translated, understood
from tandem.server.chats.answer_message import Reply
from tandem.server.chats.start import start_chat
from tandem.server.context import get_api
from tandem.server.engines.served_model import Served
from tandem.server.generation.model_wait import answered_by
from tandem.server.journal.jobs import Job
from tandem.server.openapi import documented
from tandem.server.responses import background, conversation
from tandem.server.responses.answering import Answering, OutputItems, error_event
from tandem.server.responses.schemas import ResponsesRequest
from tandem.server.responses.translate import NAMES, chat_request
from tandem.server.sse import answered, json_response, named_event
from tandem.server.validation import in_words

router = APIRouter()
_STREAMS = {"responses": {"200": {"content": {"text/event-stream": {"schema": {"type": "string"}}}}}}


@router.post("/v1/responses", openapi_extra=documented(ResponsesRequest, streams=True))
async def responses(http: Request) -> Response:
    """Answer as OpenAI's Responses API does: in one piece, as a stream, or in the background."""
    raw = await read_body(http, get_api(http).max_body)
    job: Job | None = http.scope.get("tandem.job")
    get_api(http).quotas.enter(http.scope)
    fields = await understood(http, raw, ResponsesRequest)
    kept = None
    if job is None:  # a job's conversation is whole
        stores = conversation.keeps(http, fields)
        fields, raw = await conversation.with_past(http, fields, raw)
        kept = raw if stores else None
    if job is None and fields.background:
        return await background.accept(http, fields, raw)
    return await answered_by(http, fields.model, lambda served: _answer(http, served, fields, job, kept),
                             stream=fields.stream and job is None,
                             error=lambda error: named_event({**error_event(error), "sequence_number": 0}))


async def _answer(http: Request, served: Served, fields: ResponsesRequest, job: Job | None,
                  kept: bytes | None) -> Response:
    """`kept`: the body that is to be stored with the response."""
    answer = await _start(http, served, fields, job)
    if kept is not None:
        answer.keep = lambda: conversation.keep(http, kept, answer)
    if job is not None:
        return await background.work(job, answer)
    return await answered(answer.generation, answer, stream=fields.stream)


async def _start(http: Request, served: Served, fields: ResponsesRequest, job: Job | None) -> Answering:
    """Submit the request; what a job has begun before is begun again alike. Raises RequestError."""
    ids = background.Ids(job.entry.id) if job is not None else None
    response_id = background.response_id(job.entry) if job is not None else f"resp_{uuid.uuid4().hex}"
    created = time.time() if job is None else job.entry.created
    with in_words(NAMES):
        chat = await translated(http, lambda: chat_request(fields))
        plan, generation, model = await start_chat(http, served, chat, response_id)
    output = OutputItems(Reply(plan, ids), fields.tools or (), ids)
    return Answering(fields, generation, model, output, int(created))


@router.get("/v1/responses/{response_id}", openapi_extra=_STREAMS)
async def retrieve(http: Request, response_id: str) -> Response:
    """A kept response as it is now, or with `stream` its events after number `starting_after`."""
    stored = await background.find(http, response_id)
    after = background.wanted_events(http)
    return json_response(await stored.response(http)) if after is None else stored.stream(http, after)


@router.post("/v1/responses/{response_id}/cancel")
async def cancel(http: Request, response_id: str) -> Response:
    """Stop a background response; one that is over stays as it is."""
    stored = await background.find(http, response_id)
    await stored.cancel()
    return json_response(await stored.response(http))


@router.delete("/v1/responses/{response_id}")
async def delete(http: Request, response_id: str) -> Response:
    """Stop a background response if it still runs, and keep nothing of it."""
    await (await background.find(http, response_id)).forget()
    return json_response({"id": response_id, "object": "response", "deleted": True})


@router.get("/v1/responses/{response_id}/input_items")
async def input_items(http: Request, response_id: str) -> Response:
    """The items that a kept response was made from, those of the responses before it among them, in pages."""
    return json_response(await conversation.input_items(http, response_id))


