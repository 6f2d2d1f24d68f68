"""Background responses: journaled jobs that keep their events.

A job restarted after a crash samples the same tokens with the same ids, so that a client can resume its event stream.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request
from pydantic_core import from_json
from starlette.responses import Response, StreamingResponse

from tandem.errors import NotFoundError, RequestError, invalid
from tandem.json_types import JsonObject
from tandem.server.body import translated
from tandem.server.context import get_api, get_group
from tandem.server.failures import CANCELLED
from tandem.server.responses.answering import Answering, empty_response
from tandem.server.responses.schemas import ResponsesRequest
from tandem.server.responses.translate import chat_request
from tandem.server.sse import KEEP_ALIVE, encode_json, json_response, named_event
from tandem.server.store.calls import StoredReply
from tandem.server.store.jobs import Job, Jobs, get_jobs, needs_journal
from tandem.server.store.journal import Entry

ROUTE = "/v1/responses"
_PREFIX, _JOB_PREFIX = "resp_", "req-"
ID_DIGITS = 32
"""Hex digits of a response's id, with which the ids of its items begin."""


class Ids:
    """Generator of ids (32 hex digits) that are the same after a restart of the job."""

    def __init__(self, job_id: str) -> None:
        self._job_id = job_id
        self._count = 0

    def __call__(self) -> str:
        """Return the next id."""
        self._count += 1
        return hashlib.blake2b(f"{self._job_id}:{self._count}".encode(), digest_size=16).hexdigest()


def response_id(entry: Entry) -> str:
    """Return the id of a response from its journal entry."""
    return _PREFIX + entry.id.removeprefix(_JOB_PREFIX)


def response_of(item_id: str) -> str:
    """Return the id of the response that an item belongs to, by the item's id."""
    return _PREFIX + item_id.partition("_")[2][:ID_DIGITS]


def job_id(response_id: str) -> str:
    """Return the id of a response's journal entry."""
    return _JOB_PREFIX + response_id.removeprefix(_PREFIX)


async def accept(http: Request, fields: ResponsesRequest, raw: bytes) -> Response:
    """Start a background response and return its object or event stream.

    Raises RequestError for an invalid request, or without a journal.
    """
    api, jobs = get_api(http), get_jobs(http)
    if jobs is None:
        raise needs_journal("'background' needs", "leave it out and wait for the answer or stream it", "background")
    await translated(http, lambda: chat_request(fields))
    api.find(fields.model)
    http.scope["tandem.metered"] = True
    outline = empty_response(fields, "", fields.model or api.served[0].name, 0, "queued")
    entry, _ = await jobs.start_job(get_group(http), ROUTE, raw, background=True, outline=encode_json(outline), counted=True)
    api.release(http.scope)  # the job has its own lease; with max_concurrent_requests 1 it could not start otherwise
    stored = StoredResponse(jobs, entry, jobs.job(entry))
    if fields.stream:
        return stored.stream(http, -1)
    return json_response(await stored.response(http))


async def work(job: Job, answer: Answering) -> Response:
    """Run the job to its end; return all events, which `job.log` also gets one by one. Raises RequestError."""
    generation = answer.generation
    try:
        job.log.restart(answer.head())
        while not generation.done:
            for delta in await generation.next() or ():
                job.log.add(answer.delta(delta, None))
        job.log.add(answer.usage(generation.usage(), {}))
    finally:
        generation.close()
    return Response(b"".join(job.log.events), media_type="text/event-stream")


def wanted_events(http: Request) -> int | None:
    """Return the event number to stream after (-1: all events), or None if no stream is requested. Raises RequestError."""
    query = http.query_params
    after = query.get("starting_after")
    if query.get("stream", "false").lower() not in ("true", "1"):
        return None
    if after is not None and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise invalid("starting_after", f"Invalid 'starting_after': '{after[:40]}' is not the number of an event.")
    return -1 if after is None else int(after)


async def kept(http: Request, name: str) -> StoredResponse | None:
    """Return the stored response of this client with the id `name`, or None."""
    jobs = get_jobs(http)
    if jobs is None or not name.startswith(_PREFIX):
        return None
    entry = await jobs.find(get_group(http), job_id(name))
    return StoredResponse(jobs, entry, jobs.job(entry)) if entry is not None and entry.route == ROUTE else None


async def find(http: Request, name: str) -> StoredResponse:
    """Return the stored response of this client with the id `name`. Raises NotFoundError."""
    if (stored := await kept(http, name)) is not None:
        return stored
    raise NotFoundError(
        f"Response with id '{name[:100]}' not found; only responses with 'store' or 'background' true "
        "are kept, by a server with --journal.",
        param="response_id",
        code="response_not_found",
    )


@dataclass
class StoredResponse:
    """Stored response: its journal entry and its job."""

    jobs: Jobs
    entry: Entry
    job: Job | None
    """Running job; None if the response was finished already."""

    async def request(self) -> bytes:
        """Return the body of the request. Raises JournalError, or ServerError if damaged."""
        return await self.jobs.write(self.jobs.journal.request, self.entry)

    async def response(self, http: Request) -> JsonObject:
        """Return the current response object. Raises RequestError, also at shutdown."""
        return self._response(await self.jobs.reply(self.entry, self.job), http)

    def _response(self, reply: StoredReply | None, http: Request) -> JsonObject:
        if reply is None:
            return self._empty("in_progress" if response_id(self.entry) in get_api(http).live else "queued")
        if reply.status == 200:
            last = reply.body[reply.body.rindex(b"\ndata: ") + len(b"\ndata: ") :]
            response: JsonObject = from_json(last)["response"]
            return response
        error = from_json(reply.body)["error"]
        if error["code"] == CANCELLED:
            return self._empty("cancelled")
        code = error["code"] or ("server_error" if reply.status >= 500 else "invalid_prompt")
        return self._empty("failed") | {"error": {"code": code, "message": error["message"]}}

    def _empty(self, status: str) -> JsonObject:
        outline = from_json(self.entry.outline)
        return {**outline, "id": response_id(self.entry), "created_at": int(self.entry.created), "status": status}

    def stream(self, http: Request, after: int) -> StreamingResponse:
        """Return a stream of the events after number `after`."""
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        return StreamingResponse(self._events(http, after + 1), media_type="text/event-stream", headers=headers)

    async def _events(self, http: Request, sent: int) -> AsyncIterator[bytes]:
        while self.job is not None and not self.job.reply.done():
            log = self.job.log
            if len(log.events) > sent:
                yield b"".join(log.events[sent:])
                sent = len(log.events)
            elif not await log.changed(get_api(http).heartbeat_s):
                yield KEEP_ALIVE
            if await http.is_disconnected():
                return
        try:
            reply = await self.jobs.reply(self.entry, self.job)
        except RequestError as error:
            yield named_event(
                {"type": "error", "code": error.code, "message": error.message, "param": None, "sequence_number": sent}
            )
            return
        if reply is None or reply.status != 200:
            final = self._response(reply, http)
            yield named_event({"type": "response.failed", "response": final, "sequence_number": sent})
        else:
            events = reply.body.split(b"\n\n")[:-1]
            # A restarted job may have fewer events than the client has seen (larger deltas): then send only the last.
            yield b"".join(event + b"\n\n" for event in events[sent if sent <= len(events) else -1 :])

    async def cancel(self) -> None:
        """Cancel the job, if it runs, and wait until that is stored."""
        if self.job is not None:
            self.job.cancelled.set()
            await asyncio.shield(self.job.reply)

    async def forget(self) -> None:
        """Cancel the job, if it runs, and delete the response."""
        await self.jobs.forget(self.entry)
