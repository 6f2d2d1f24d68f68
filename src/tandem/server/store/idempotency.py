"""Journaled requests: middleware for `Idempotency-Key` and `Prefer: respond-async`, and routes to get or delete them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from fastapi import APIRouter, Request
from msgspec import DecodeError, Struct
from msgspec.json import decode as decode_json
from pydantic_core import from_json
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import NotFoundError, invalid
from tandem.server.body import read_body
from tandem.server.chats.texts import LARGE, off_loop
from tandem.server.context import Api, get_group
from tandem.server.failures import refused
from tandem.server.responses.background import ROUTE as RESPONSES
from tandem.server.sse import encode_json, json_response
from tandem.server.store.calls import StoredReply
from tandem.server.store.jobs import Jobs, get_jobs, request_digest
from tandem.server.store.journal import Entry

router = APIRouter()
ROUTES = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/embeddings"})
LONGEST_KEY = 255


class Idempotency:
    """ASGI middleware, inside `Gate`, that journals requests with `Idempotency-Key` or `Prefer: respond-async`."""

    def __init__(self, app: ASGIApp, api: Api, jobs: Jobs) -> None:
        self._app = app
        self._api = api
        self._jobs = jobs
        jobs.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; streams and others pass through. Raises RequestError, which `Gate` answers."""
        if scope["type"] != "http" or scope["method"] != "POST" or scope["path"] not in ROUTES:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = _key(headers.getlist("idempotency-key"))
        background = any(_wants_async(value) for value in headers.getlist("prefer"))
        if not (key or background):
            await self._app(scope, receive, send)
            return
        body = await read_body(Request(scope, receive), self._api.max_body)
        if await off_loop(len(body) > LARGE, _streams, body):
            # Streams cannot be replayed; bodies that are not JSON objects are refused by the route.
            await self._app(scope, _again(body, receive), send)
            return
        scope["tandem.metered"] = True
        scope["tandem.route"] = scope["path"]
        response = await self._serve(get_group(Request(scope)), scope["path"], body, key, background)
        await response(scope, receive, send)

    async def _serve(self, group: str, route: str, body: bytes, key: str, background: bool) -> Response:
        entry, fresh = await self._jobs.start_job(group, route, body, key=key, background=background)
        job = self._jobs.job(entry)
        if not fresh and entry.digest != request_digest(route, body):
            raise refused(
                422,
                f"The Idempotency-Key '{key}' belongs to another request; use a new one for each request.",
                param="Idempotency-Key",
                code="idempotency_key_reused",
            )
        more = {"x-request-id": entry.id} | ({} if fresh else {"idempotent-replayed": "true"})
        if background:
            receipt = {"id": entry.id, "object": "request", "status": _state(entry.status)}
            more |= {"location": f"/v1/requests/{entry.id}", "preference-applied": "respond-async"}
            return Response(encode_json(receipt), 202, more, "application/json")
        if job is not None:
            await asyncio.wait((job.reply,))
        reply = await self._jobs.reply(entry, job)
        assert reply is not None
        return Response(reply.body, reply.status, dict(_text(reply)) | more, "application/json")


def _state(status: int | None) -> str:
    """Return the state of a request from the HTTP status of its answer; None: not answered yet."""
    return "in_progress" if status is None else "completed" if status == 200 else "failed"


def _key(values: Sequence[str]) -> str:
    """Return the Idempotency-Key; empty without one. Raises RequestError for an invalid one."""
    if not values:
        return ""
    key = values[0].strip().strip('"')
    if len(values) > 1 or not 0 < len(key) <= LONGEST_KEY or not (key.isascii() and key.isprintable()):
        raise invalid(
            "Idempotency-Key", f"The Idempotency-Key must be one text of 1 to {LONGEST_KEY} printable ASCII characters."
        )
    return key


def _wants_async(prefer: str) -> bool:
    return "respond-async" in (part.split(";")[0].strip().lower() for part in prefer.split(","))


class _Asked(Struct):
    stream: object = None


def _streams(body: bytes) -> bool:
    """Return whether a body asks for a stream; also True for a body that is not a JSON object. Decodes only `stream`."""
    try:
        return bool(decode_json(body, type=_Asked).stream)
    except (DecodeError, UnicodeDecodeError, RecursionError):
        return True


def _again(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that repeats the body, then continues with `receive`."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def first() -> Message:
        return messages.pop() if messages else await receive()

    return first


def _text(reply: StoredReply) -> list[tuple[str, str]]:
    """Return the reply's headers as text, except Content-Length and Content-Type."""
    return [
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in reply.headers
        if name.lower() not in (b"content-length", b"content-type")
    ]


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
    """Return a journaled request by id or Idempotency-Key, with its response if there is one."""
    jobs, entry = await _find(http, request_id)
    reply = await jobs.reply(entry, jobs.job(entry))
    body = {
        "id": entry.id,
        "object": "request",
        "status": _state(None if reply is None else reply.status),
        "created_at": int(entry.created),
        "idempotency_key": entry.key or None,
        "status_code": None if reply is None else reply.status,
        "response": None if reply is None else from_json(reply.body),
    }
    return json_response(body)


@router.delete("/v1/requests/{request_id:path}")
async def forget(http: Request, request_id: str) -> Response:
    """Cancel a journaled request if it runs, and delete it with its answer."""
    jobs, entry = await _find(http, request_id)
    await jobs.forget(entry)
    return json_response({"id": entry.id, "object": "request", "deleted": True})
