"""Routes of Ollama's API about models: GET /api/tags, /api/ps and /api/version, POST /api/show and /api/pull, DELETE
/api/delete."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import Response

from tandem.checkpoints.config import read_any_json
from tandem.errors import RequestError, TandemError
from tandem.json_types import JsonObject
from tandem.server.acquire import find_model
from tandem.server.body import parse
from tandem.server.chats.texts import off_loop
from tandem.server.context import get_api
from tandem.server.engines.served_model import Served
from tandem.server.failures import refused
from tandem.server.ollama.schemas import ModelRequest
from tandem.server.openai.models import model_object
from tandem.server.openapi import documented
from tandem.server.sse import encode_json, json_response
from tandem.server.tools.choose import thinks

router = APIRouter()

VERSION = "0.12.6"
"""Version of Ollama whose API this is; clients compare it with the one they need."""
FOREVER = "2318-01-01T00:00:00Z"


def canonical(http: Request, name: str) -> str:
    """Return `name` without Ollama's tag `:latest`, unless a model is called so."""
    known = {other for served in get_api(http).served for other in served.names()}
    return name if name in known else name.removesuffix(":latest")


@router.get("/api/version")
async def version() -> Response:
    """Return the version of Ollama whose API is served."""
    return json_response({"version": VERSION})


@router.get("/api/tags")
async def tags(http: Request) -> Response:
    """List all models."""
    return json_response({"models": [await _entry(http, served) for served in get_api(http).served]})


@router.get("/api/ps")
async def ps(http: Request) -> Response:
    """List the loaded models."""
    api = get_api(http)
    models = []
    for served in api.served:
        if model_object(api, served)["loaded"]:
            entry = await _entry(http, served)
            entry |= {"expires_at": FOREVER, "size_vram": entry["size"], "context_length": api.max_context(served) or 0}
            models.append(entry)
    return json_response({"models": models})


@router.post("/api/show", openapi_extra=documented(ModelRequest))
async def show(http: Request) -> Response:
    """Describe a model; its template only while loaded."""
    served, api = await _named(http), get_api(http)
    entry, status = await _entry(http, served), served.client.status
    template = (await served.texts.tokenizer(status)).chat_template if status is not None and served.ready() else ""
    family = entry["details"]["family"]
    able = {
        "completion": status is None or status.generates,
        "tools": served.settings.server.tool_parser != "none",
        "thinking": thinks(served.settings.server.reasoning_parser, template),
        "embedding": status is not None and not status.generates,
    }
    body = {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": entry["details"],
        "model_info": {
            "general.architecture": family,
            "general.basename": served.name,
            f"{family}.context_length": api.max_context(served) or 0,
        },
        "capabilities": [name for name, has in able.items() if has],
        "modified_at": entry["modified_at"],
    }
    return json_response(body)


@router.post("/api/pull", openapi_extra=documented(ModelRequest))
async def pull(http: Request) -> Response:
    """Confirm that a model is here; others are not fetched, as the server is started with its models."""
    fields = await parse(http, ModelRequest)
    await _named(http, fields)
    steps = [{"status": "success"}]
    if fields.stream is not False:
        return Response(b"".join(encode_json(step) + b"\n" for step in steps), media_type="application/x-ndjson")
    return json_response(steps[-1])


@router.delete("/api/delete", openapi_extra=documented(ModelRequest))
async def delete(http: Request) -> Response:
    """Refuse to delete a model, as it is served."""
    served = await _named(http)
    message = f"The model '{served.name}' is served; to delete its files end the server, and run tandem model rm."
    raise refused(409, message, param="model", code="model_kept")


async def _named(http: Request, fields: ModelRequest | None = None) -> Served:
    """Return the model that the body names. Raises RequestError."""
    fields = fields or await parse(http, ModelRequest)
    if not (name := fields.model or fields.name):
        raise RequestError("Missing required parameter: 'model'.", param="model", code="missing_required_parameter")
    return find_model(http, canonical(http, name))


async def _entry(http: Request, served: Served) -> JsonObject:
    """Return a model as /api/tags lists it. The digest is of its name; its size is that of the loaded weights."""
    status = served.client.status
    config = await off_loop(True, _config, status.source) if status is not None and status.source else {}
    bits = (config.get("quantization") or {}).get("bits")
    ranks = [] if status is None else [rank for rank in status.ranks if rank.replica == status.ranks[0].replica]
    family = str(config.get("model_type") or "unknown")
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": datetime.fromtimestamp(int(get_api(http).started), UTC).isoformat(),
        "size": sum(rank.weight_bytes for rank in ranks),
        "digest": hashlib.sha256(served.name.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": "safetensors",
            "family": family,
            "families": [family],
            "parameter_size": "",
            "quantization_level": f"{bits}-bit" if bits else "",
        },
    }


def _config(source: str) -> JsonObject:
    """Return the model's config.json; empty if it cannot be read."""
    try:
        config = read_any_json(Path(source) / "config.json")
    except (TandemError, OSError):
        return {}
    return config if isinstance(config, dict) else {}
