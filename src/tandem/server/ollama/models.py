"""Routes of Ollama's API about models: tags, ps, version, show, pull and delete."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.errors import NotFoundError
from tandem.json_types import JsonObject
from tandem.server.acquire import find_model
from tandem.server.body import parse
from tandem.server.chats.pictures import unseen
from tandem.server.context import Api, get_api
from tandem.server.engines.served_model import Served
from tandem.server.failures import refused
from tandem.server.ollama.requests import ModelRequest
from tandem.server.openai.models import model_object
from tandem.server.openapi import OllamaError, documented, failures
from tandem.server.sse import encode_json, json_response
from tandem.server.tools.choose import thinks

router = APIRouter(responses=failures(OllamaError))

NDJSON = "application/x-ndjson"
VERSION = "0.12.6"
"""Version of Ollama whose API this is; clients compare it with the one they need."""
FAMILY = "tandem"
"""Family and architecture of all models: the key under which clients find the context length."""
FOREVER = "2318-01-01T00:00:00Z"


def canonical(http: Request, name: str) -> str:
    """Return `name` without Ollama's tag `:latest`, unless a model is called so."""
    known = {other for served in get_api(http).listed() for other in (served.name, *served.names())}
    return name if name in known else name.removesuffix(":latest")


@router.get("/api/version")
async def version() -> Response:
    """Return the version of Ollama whose API is served."""
    return json_response({"version": VERSION})


@router.get("/api/tags")
async def tags(http: Request) -> Response:
    """List all models."""
    api = get_api(http)
    return json_response({"models": [_entry(api, served) for served in api.listed()]})


@router.get("/api/ps")
async def ps(http: Request) -> Response:
    """List the loaded models."""
    api = get_api(http)
    loaded = [served for served in api.listed() if model_object(api, served)["loaded"]]
    return json_response({"models": [_entry(api, served) | {"expires_at": FOREVER} for served in loaded]})


@router.post("/api/show", openapi_extra=documented(ModelRequest))
async def show(http: Request) -> Response:
    """Describe a model; its chat template and whether it thinks are known while it is loaded."""
    api, (served, _) = get_api(http), await _named(http)
    entry, status, settings = _entry(api, served), served.client.status, served.settings.server
    template = (await served.texts.tokenizer(status)).chat_template if status is not None and served.ready() else ""
    able = {
        "completion": status is None or status.generates,
        "embedding": status is not None and not status.generates,
        "tools": settings.tool_parser != "none",
        "vision": status is not None and bool(status.source) and not unseen(status),
        "thinking": thinks(settings.reasoning_parser, template),
    }
    known = {"general.architecture": FAMILY, "general.basename": served.name, f"{FAMILY}.context_length": entry["context_length"]}
    told = {"modelfile": "", "parameters": "", "template": template, "model_info": known}
    return json_response({**entry, **told, "capabilities": [name for name, has in able.items() if has]})


@router.post("/api/pull", openapi_extra=documented(ModelRequest, streams=True, stream_type=NDJSON))
async def pull(http: Request) -> Response:
    """Confirm that a model is here; others are not fetched, as the server is started with its models."""
    try:
        _, stream = await _named(http)
    except NotFoundError as error:
        raise NotFoundError(f"{error.message}. A server fetches none: run `tandem pull`, then serve it.") from None
    return Response(encode_json({"status": "success"}) + b"\n", media_type=NDJSON if stream else "application/json")


@router.delete("/api/delete", openapi_extra=documented(ModelRequest))
async def delete(http: Request) -> Response:
    """Refuse to delete a model, as it is served."""
    served, _ = await _named(http)
    message = f"The model '{served.name}' is served; to delete its files, end the server and run tandem model rm."
    raise refused(409, message, param="model", code="model_kept")


async def _named(http: Request) -> tuple[Served, bool]:
    """Return the model that the body names, and its `stream`. Raises RequestError."""
    fields = await parse(http, ModelRequest)
    return find_model(http, canonical(http, fields.model or fields.name)), fields.stream


def _entry(api: Api, served: Served) -> JsonObject:
    """Return a model as /api/tags lists it. `digest` is of its name; `size` counts the loaded weights."""
    ranks = served.client.status.ranks if served.client.status is not None else []
    size = sum(rank.weight_bytes for rank in ranks if rank.replica == ranks[0].replica)
    details = {"parent_model": "", "format": "safetensors", "family": FAMILY, "families": [FAMILY], "parameter_size": ""}
    return {
        **dict.fromkeys(("name", "model"), served.name),
        **dict.fromkeys(("size", "size_vram"), size),
        "details": {**details, "quantization_level": ""},
        "digest": hashlib.sha256(served.name.encode()).hexdigest(),
        "modified_at": datetime.fromtimestamp(int(api.started), UTC).isoformat(),
        "context_length": api.max_context(served) or 0,
    }
