"""Routes under /v1/models: list models, and load and unload them in a model pool."""

from __future__ import annotations

from datetime import UTC, datetime

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from tandem.config.several import usable_name
from tandem.errors import RequestError
from tandem.server.acquire import acquire
from tandem.server.body import parse
from tandem.server.chats.pictures import unseen
from tandem.server.context import Api, get_api, unless_gone
from tandem.server.engines.served_model import Served
from tandem.server.failures import refused
from tandem.server.openai.schemas import LoadLoRAAdapterRequest, UnloadLoRAAdapterRequest
from tandem.server.sse import json_response

router = APIRouter()


def model_object(api: Api, served: Served) -> dict[str, object]:
    """Return OpenAI's model object, extended by vLLM's `max_model_len`, OpenRouter's `architecture` and the loading state."""
    state, detail = served.state if api.model_pool is None else api.model_pool.state(served)
    status = served.client.status
    return {
        "id": served.name,
        "object": "model",
        "created": int(api.started),
        "owned_by": "tandem",
        "root": served.client.adapters.get(served.adapter, served.base_name),
        "parent": served.base_name if served.adapter in served.client.adapters else None,
        "max_model_len": api.max_context(served),
        "loaded": state in ("loaded", "recovering", "draining"),
        "state": state,
        **({"architecture": _architecture(pictures=not unseen(status))} if status is not None and status.source else {}),
        **({"detail": detail} if detail else {}),
    }


def _architecture(*, pictures: bool) -> dict[str, object]:
    """Return what a model reads and writes, as OpenRouter's model objects say it."""
    inputs = ["text", "image"] if pictures else ["text"]
    return {"modality": f"{'+'.join(inputs)}->text", "input_modalities": inputs, "output_modalities": ["text"]}


def model_info(api: Api, served: Served) -> dict[str, object]:
    """Return Anthropic's model object."""
    known = model_object(api, served)
    return {
        "type": "model",
        "id": known["id"],
        "display_name": known["id"],
        "created_at": datetime.fromtimestamp(int(api.started), UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": known["max_model_len"],
        "max_tokens": known["max_model_len"],
    }


@router.get("/v1/models")
async def models(http: Request) -> Response:
    """List all models, default first; in Anthropic's format with a header `anthropic-version`."""
    api = get_api(http)
    if "anthropic-version" in http.headers:
        page = [model_info(api, served) for served in api.listed()]
        body = {"data": page, "has_more": False, "first_id": page[0]["id"], "last_id": page[-1]["id"]}
    else:
        body = {"object": "list", "data": [model_object(api, served) for served in api.listed()]}
    return json_response(body)


@router.get("/v1/models/{model_id:path}")
async def model(http: Request, model_id: str) -> Response:
    """Return a model by any of its names."""
    api = get_api(http)
    served = api.find(model_id)
    return json_response((model_info if "anthropic-version" in http.headers else model_object)(api, served))


@router.post("/v1/load_lora_adapter")
async def load_lora_adapter(http: Request) -> Response:
    """Load a LoRA adapter beside its base; respond when all engines have it (vLLM)."""
    body = await parse(http, LoadLoRAAdapterRequest)
    served, names = await acquire(http, body.base_model_name), {one.name for one in get_api(http).listed()}
    served.status()
    if body.lora_name in names or not usable_name(body.lora_name):
        loaded = any(body.lora_name in one.client.adapters for one in get_api(http).served)
        taken = "has already been loaded; unload it first" if loaded else "has the name of a model; choose another"
        why = taken if body.lora_name in names else "cannot be a model's name"
        raise RequestError(f"The lora adapter '{body.lora_name[:200]}' {why}.", param="lora_name", code="adapter_refused")
    await served.client.change_adapter(body.lora_name, body.lora_path)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_lora_adapter(http: Request) -> Response:
    """Unload a LoRA adapter once its running requests are finished; new ones get 404 at once (vLLM)."""
    body = await parse(http, UnloadLoRAAdapterRequest)
    served = get_api(http).served
    base = next((one for one in served if body.lora_name in one.client.adapters), served[0])
    await base.client.change_adapter(body.lora_name)
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


@router.post("/v1/models/{model_id:path}/load")
async def load(http: Request, model_id: str) -> Response:
    """Load a model and respond when done; as for a request, other models may be unloaded for it."""
    api = get_api(http)
    api.check()
    return json_response(model_object(api, await acquire(http, model_id)))


@router.post("/v1/models/{model_id:path}/unload")
async def unload(http: Request, model_id: str) -> Response:
    """Unload a model after its running requests and respond when done. The next request loads it again."""
    api = get_api(http)
    served = api.find(model_id)
    if served.adapter:
        raise refused(409, "This is a LoRA adapter: POST /v1/unload_lora_adapter unloads it.", param="model", code="model_kept")
    if api.model_pool is None:
        raise refused(409, "This server has one model, which stays loaded until it ends.", param="model", code="model_kept")
    await unless_gone(http, api.model_pool.unload(served))
    return json_response(model_object(api, served))
