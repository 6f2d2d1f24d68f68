"""Journalled requests: asking for the answer, and having it forgotten."""

from __future__ import annotations

from fastapi import APIRouter, Request
from pydantic_core import from_json
from starlette.responses import Response

from tandem.errors import NotFoundError
from tandem.server.context import get_group
from tandem.server.journal.jobs import Jobs, get_jobs
from tandem.server.journal.journal import Entry
from tandem.server.responses.background import ROUTE as RESPONSES
from tandem.server.sse import json_response

router = APIRouter()


async def _find(http: Request, name: str) -> tuple[Jobs, Entry]:
    jobs = get_jobs(http)
    if jobs is None:
        raise NotFoundError("This server keeps no requests (--journal).", param="request_id", code="request_not_found")
    entry = await jobs.find(get_group(http), name)
    if entry is None or entry.route == RESPONSES:
        raise NotFoundError(f"No request '{name[:100]}' is kept.", param="request_id", code="request_not_found")
    return jobs, entry


@router.get("/v1/requests/{request_id:path}")
async def retrieve(http: Request, request_id: str) -> Response:
    """A journalled request by its id or Idempotency-Key, with the response if there is one."""
    jobs, entry = await _find(http, request_id)
    reply = await jobs.reply(entry, jobs.job(entry))
    state = "in_progress" if reply is None else "completed" if reply.status == 200 else "failed"
    body = {
        "id": entry.id,
        "object": "request",
        "status": state,
        "created_at": int(entry.created),
        "idempotency_key": entry.key or None,
        "status_code": None if reply is None else reply.status,
        "response": None if reply is None else from_json(reply.body),
    }
    return json_response(body)


@router.delete("/v1/requests/{request_id:path}")
async def forget(http: Request, request_id: str) -> Response:
    """Stop a journalled request if it still runs, and drop its answer."""
    jobs, entry = await _find(http, request_id)
    await jobs.forget(entry)
    return json_response({"id": entry.id, "object": "request", "deleted": True})
