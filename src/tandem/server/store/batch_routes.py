"""Routes /v1/files and /v1/batches of OpenAI's API."""

from __future__ import annotations

import time
from typing import Annotated, Literal, cast

from fastapi import APIRouter, Request
from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError
from starlette.datastructures import Headers
from starlette.responses import FileResponse, Response
from starlette.types import Message, Receive, Scope, Send

from tandem.errors import NotFoundError, invalid
from tandem.server.body import read_body
from tandem.server.body_validation import parse_bytes
from tandem.server.context import get_api, get_group, new_id, note_ignored
from tandem.server.failures import error_response, refused
from tandem.server.lists import page
from tandem.server.openai.messages import Strict
from tandem.server.openapi import documented
from tandem.server.sse import json_response
from tandem.server.store.batches import Batches, BatchRecord
from tandem.server.store.files import KEEP_S, LONGEST_S, SHORTEST_S, File, on_disk
from tandem.server.store.jobs import needs_journal

router = APIRouter()
MAX_BODY = 65536
HOUR_S = 3600.0


class _Content(FileResponse):
    """File response whose errors about a Range header have our error envelope."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the file or the error."""
        refusal: Response | None = None

        async def tell(message: Message) -> None:
            nonlocal refusal
            if message["type"] == "http.response.start" and message["status"] in (400, 416):
                asked, headers = Headers(scope=scope).get("range", "")[:100], Headers(raw=message["headers"])
                refusal = error_response(
                    refused(
                        message["status"],
                        f"The header Range: {asked} cannot be served; send bytes=FIRST-LAST within the file.",
                        param="Range",
                        code="invalid_range",
                    )
                )
                if "content-range" in headers:
                    refusal.headers["content-range"] = headers["content-range"]
            elif refusal is None:
                await send(message)

        await super().__call__(scope, receive, tell)
        if refusal is not None:
            await refusal(scope, receive, send)


class ExpiresAfter(Strict):
    """Expiry of a batch's output files."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST_S, le=LONGEST_S)]


class BatchRequest(Strict):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Annotated[str, Field(pattern=r"^[1-9][0-9]{0,2}h$")]
    """Time limit in hours, such as 24h."""
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None

    @field_validator("metadata")
    @classmethod
    def _small(cls, value: dict[str, str] | None) -> dict[str, str] | None:
        if value and (len(value) > 16 or any(len(name) > 64 or len(text) > 512 for name, text in value.items())):
            raise PydanticCustomError("metadata", "at most 16 pairs, names of 64 and texts of 512 characters")
        return value


_FORM = {
    "type": "object",
    "required": ["purpose", "file"],
    "properties": {
        "purpose": {"enum": ["batch"]},
        "file": {"type": "string", "format": "binary"},
        "expires_after[anchor]": {"enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    },
}
_UPLOAD = {"requestBody": {"required": True, "content": {"multipart/form-data": {"schema": _FORM}}}}
_BYTES = {"responses": {"200": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}}}


def _batches(http: Request) -> Batches:
    """Return the application's batches. Raises RequestError without a journal."""
    batches = cast("Batches | None", http.app.state.batches)
    if batches is None:
        raise needs_journal("Files and batches need", "use `tandem batch`", code="unsupported_operation")
    return batches


def _owner(http: Request) -> str | None:
    """Return the client group whose files and batches this client may see; None for all (no API keys)."""
    return get_group(http) if get_api(http).keys else None


def _file(http: Request, file_id: str) -> File:
    file = _batches(http).files.find(file_id, _owner(http))
    if file is None:
        raise NotFoundError(f"No such File object: {file_id[:100]}", param="id", code="file_not_found")
    return file


def _batch(http: Request, batch_id: str) -> BatchRecord:
    batch = _batches(http).find(batch_id, _owner(http))
    if batch is None:
        raise NotFoundError(f"No batch found with id '{batch_id[:100]}'.", param="batch_id", code="batch_not_found")
    return batch


@router.post("/v1/files", openapi_extra=_UPLOAD)
async def create_file(http: Request) -> Response:
    """Upload an input file for a batch."""
    batches = _batches(http)
    api = get_api(http)
    api.check_open()
    limit = int(api.settings.server.max_file_mb * 2**20)
    file = await batches.files.take(http, get_group(http), limit)
    return json_response(file.shown())


@router.get("/v1/files")
async def list_files(http: Request) -> Response:
    """List this client's files, latest first, in pages."""
    purpose = http.query_params.get("purpose")
    files = [file.shown() for file in _batches(http).files.of(_owner(http)) if purpose in (None, file.purpose)]
    return json_response(page(files, http, newest_first=True, most=10_000, usual=10_000))


@router.get("/v1/files/{file_id}")
async def retrieve_file(http: Request, file_id: str) -> Response:
    """Return OpenAI's file object."""
    return json_response(_file(http, file_id).shown())


@router.get("/v1/files/{file_id}/content", openapi_extra=_BYTES)
async def file_content(http: Request, file_id: str) -> Response:
    """Return the content of a file."""
    file = _file(http, file_id)
    # Browsers must never render a client's file as a page of this server.
    headers = {"content-disposition": "attachment", "x-content-type-options": "nosniff"}
    path = _batches(http).files.path(file.id)
    with on_disk():
        status = path.stat()
    return _Content(path, media_type="application/octet-stream", headers=headers, stat_result=status)


@router.delete("/v1/files/{file_id}")
async def delete_file(http: Request, file_id: str) -> Response:
    """Delete a file; a running batch over it continues."""
    file = _file(http, file_id)
    with on_disk():
        await _batches(http).files.drop(file.id)
    return json_response({"id": file.id, "object": "file", "deleted": True})


@router.post("/v1/batches", openapi_extra=documented(BatchRequest))
async def create_batch(http: Request) -> Response:
    """Create a batch from an uploaded file and start it."""
    batches, api = _batches(http), get_api(http)
    api.check_open()
    raw = await read_body(http, MAX_BODY)
    fields, left_out = parse_bytes(raw, BatchRequest, api.settings.server.unknown_fields)
    if left_out:
        note_ignored(http, *left_out)
    file = batches.files.find(fields.input_file_id, _owner(http))
    if file is None or file.purpose != "batch":
        raise invalid(
            "input_file_id", f"Invalid 'input_file_id': there is no file '{fields.input_file_id[:100]}' with the purpose 'batch'."
        )
    now, keep = time.time(), fields.output_expires_after
    batch = BatchRecord(
        id=new_id("batch", "_"),
        owner=get_group(http),
        endpoint=fields.endpoint,
        input_file_id=file.id,
        completion_window=fields.completion_window,
        created_at=now,
        metadata=fields.metadata,
        expires_at=now + HOUR_S * int(fields.completion_window[:-1]),
        keep_s=float(keep.seconds) if keep is not None else KEEP_S,
    )
    await batches.create(batch)
    return json_response(batch.shown())


@router.get("/v1/batches")
async def list_batches(http: Request) -> Response:
    """List this client's batches, latest first, in pages."""
    batches = [batch.shown() for batch in _batches(http).of(_owner(http))]
    return json_response(page(batches, http, newest_first=True))


@router.get("/v1/batches/{batch_id}")
async def retrieve_batch(http: Request, batch_id: str) -> Response:
    """Return a batch's current state."""
    return json_response(_batch(http, batch_id).shown())


@router.post("/v1/batches/{batch_id}/cancel")
async def cancel_batch(http: Request, batch_id: str) -> Response:
    """Cancel a batch; finished answers are kept."""
    batch = _batch(http, batch_id)
    await _batches(http).cancel(batch)
    return json_response(batch.shown())
