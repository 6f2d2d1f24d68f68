"""Routes for service information, health, status, metrics and events, and to cancel requests."""

from __future__ import annotations

import time
from typing import Annotated

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response

from tandem.errors import NotFoundError
from tandem.protocol.events import KEPT, Event
from tandem.server.body import require_known
from tandem.server.context import Api, get_api, get_group
from tandem.server.engines.replicas import merged_metrics
from tandem.server.engines.served_model import Served
from tandem.server.failures import cancelled
from tandem.server.generation import Running
from tandem.server.openai.models import model_object
from tandem.server.sse import json_response
from tandem.server.status.page import prefers_page
from tandem.version import __version__

router = APIRouter()

ENDPOINTS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "score": "/v1/score",
    "ollama": "/api",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "count_tokens": "/v1/messages/count_tokens",
    "models": "/v1/models",
    "tokenize": "/tokenize",
    "detokenize": "/detokenize",
    "health": "/health",
    "model_info": "/model/info",
    "status": "/v1/status",
    "events": "/v1/events",
    "metrics": "/metrics",
    "cache": "/v1/cache",
    "plan": "/v1/plan",
    "page": "/ui",
}


def _model_name(api: Api) -> str:
    return api.served[0].name


def _health(api: Api) -> str:
    status = api.client.status
    if api.draining:
        return "draining"
    if api.model_pool is not None:
        return api.model_pool.health
    if status is None or not api.client.alive:
        return "unreachable"
    return {"ready": "healthy"}.get(status.state, status.state)


def _detail(api: Api) -> str:
    """Return the engine's detail text, or, if none answers, why."""
    status = api.client.status
    if status is not None and api.client.alive:
        return status.detail
    details = [replica.detail for replica in api.client.replicas() if replica.detail]
    return details[0] if details else status.detail if status else ""


@router.head("/", include_in_schema=False)  # agents probe the server with it
@router.get("/")
async def service(http: Request) -> Response:
    """Return the service's name and endpoints; redirect browsers to /ui."""
    if prefers_page(http.headers.get("accept", "")):
        return RedirectResponse("/ui", 307)
    return json_response({"name": "Tandem", "version": __version__, "model": _model_name(get_api(http)), "endpoints": ENDPOINTS})


@router.get("/health/live")
async def live() -> Response:
    """Return 200 while the api process runs (liveness). Needs no API key."""
    return json_response({"status": "alive"})


_DOWN: dict[int | str, dict[str, object]] = {503: {"description": "The same, while no request can be answered."}}


@router.api_route("/ping", methods=["GET", "POST"], include_in_schema=False)  # vLLM's, for load balancers
@router.get("/health/ready", responses=_DOWN)
async def ready(http: Request) -> Response:
    """Return 200 if a request would be served now, or once its model is loaded; else 503. Needs no API key."""
    api = get_api(http)
    return json_response({"status": "ready"}) if api.ready() else json_response({"status": _health(api)}, 503)


@router.get("/version")
async def version() -> Response:
    """Return the version of Tandem."""
    return json_response({"version": __version__})


@router.get("/health", responses=_DOWN)
async def health(http: Request) -> Response:
    """Return the state of api, engine and ranks; without a required API key, only the overall state."""
    api = get_api(http)
    state = _health(api)
    code = 200 if state in ("healthy", "recovering") else 503
    if not http.scope.get("tandem.trusted"):
        return json_response({"status": state}, code)
    status = api.client.status
    reachable = status is not None and api.client.alive
    body = {
        "status": state,
        "api": "ready",
        "detail": _detail(api),
        "model_loaded": bool(reachable and status and status.state in ("ready", "draining")),
        "model_name": _model_name(api),
        "available_models": [served.name for served in api.served],
        "models": [model_object(api, served) for served in api.served],
        "model_type": "llm",
        "engine_type": "batched",
        "mcp": None,
        "config": {"port": _port(http), "cors_enabled": bool(api.settings.server.cors_origin)},
        "uptime_seconds": round(time.time() - api.started, 1),
        "restarts": status.restarts if status else 0,
        "degraded": status.degraded if status and reachable else "",
        "kv_dtype": status.kv_dtype if status and reachable else "",
        "kv_bytes_per_token": status.kv_bytes_per_token if status and reachable else 0,
        "world_size": len(status.ranks) if status else 0,
        "ranks": msgspec.to_builtins(status.ranks) if status and reachable else [],
        "replicas": msgspec.to_builtins(api.client.replicas()),
    }
    return json_response(body, code)


def _port(http: Request) -> int | None:
    server = http.scope.get("server")
    return server[1] if server else None


@router.get("/model/info")
async def model_info(http: Request) -> Response:
    """Return the (default) model's limits, and its layout over ranks."""
    api = get_api(http)
    served = api.served[0]
    status, limit = served.client.check(), served.settings.server.default_max_tokens
    facts: dict[str, object] = {
        "id": status.model,
        "model": served.settings.model.model or status.model,
        "max_context_length": status.max_context,
        "max_tokens": min(limit or status.defaults.max_tokens or status.max_context, status.max_context),
        "backend": "tandem",
        "num_devices": len(status.ranks),
    }
    more: dict[str, object] = {"vocab_size": status.vocab_size, "stages": status.stages, "lanes": status.micro_batches}
    same = ("kv_dtype", "kv_bytes_per_token", "prefix_cache", "kv_disk", "speculation")
    more |= {name: getattr(status, name) for name in same} | {"generation_config": served.settings.model.generation_config}
    more |= {"default_sampling_params": status.defaults.given() | ({"max_tokens": limit} if limit else {})}
    return json_response({**facts, **more, "kv_tokens_total": status.kv_tokens_total, "models": [facts]})


@router.get("/v1/status")
async def status_route(http: Request) -> Response:
    """Return the engine's current state, and this client's running requests."""
    api = get_api(http)
    await api.client.refresh()
    status = api.client.status
    group = get_group(http)
    mine = [live for live in api.live.values() if api.find_live(live.request_id, group)]
    engine = msgspec.to_builtins(status) if status and api.client.alive else None
    if engine is not None:
        for name in ("query_id", "source", "type", "events"):  # /v1/events has all events
            engine.pop(name, None)
    body = {
        "status": _health(api),
        "model": _model_name(api),
        "uptime_seconds": round(time.time() - api.started, 1),
        "num_running": status.running if engine and status else 0,
        "num_waiting": (status.queued if engine and status else 0) + (api.model_pool.waiting if api.model_pool else 0),
        "models": [_model(api, served) for served in api.served],
        "budget": api.model_pool.budget if api.model_pool is not None else {},
        "engine": engine,
        "replicas": msgspec.to_builtins(api.client.replicas()),
        "requests": [_live(request) for request in mine],
    }
    return json_response(body)


def _model(api: Api, served: Served) -> dict[str, object]:
    """Return a model as in /v1/models, with its memory needs and its loading progress."""
    status = served.client.status
    loading = status.loading if status is not None and status.state == "starting" else []
    facts = api.model_pool.facts(served) if api.model_pool is not None else {}
    return {**model_object(api, served), **facts, "loading": msgspec.to_builtins(loading)}


def _live(request: Running) -> dict[str, object]:
    same = ("request_id", "model", "route", "stream", "prompt_tokens", "completion_tokens", "choices")
    return {
        **{name: getattr(request, name) for name in same},
        "created": int(request.created),
        "elapsed_seconds": round(time.time() - request.created, 3),
    }


@router.post("/v1/requests/{request_id}/cancel")
async def cancel(http: Request, request_id: str) -> Response:
    """Abort a running request; its own client gets an error with code `request_cancelled`."""
    request = get_api(http).find_live(request_id, get_group(http))
    if request is None:
        raise NotFoundError(f"No request '{request_id[:100]}' is running.", param="request_id", code="request_not_found")
    request.end(cancelled())
    return json_response({"request_id": request_id, "cancelled": True})


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(http: Request) -> Response:
    """Return Prometheus metrics of the engines and of this api process."""
    api = get_api(http)
    if not api.settings.server.enable_metrics:
        raise NotFoundError("Metrics are switched off (--enable-metrics turns them on).", code="unknown_url")
    text = await api.client.metrics()
    if api.model_pool is None:
        text = merged_metrics({_model_name(api): text}, "model")
    if text and not text.endswith(b"\n"):
        text += b"\n"
    return Response(text + api.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/v1/events")
async def events_route(
    http: Request,
    after: Annotated[int, Query(ge=0, description="number of the last event that the client has")] = 0,
    limit: Annotated[int, Query(ge=1, le=KEPT, description="only the latest so many")] = KEPT,
) -> Response:
    """Return recent events, oldest first, such as lost or replaced ranks and loaded or unloaded models."""
    require_known(http.query_params, ("after", "limit"))
    api, group = get_api(http), get_group(http)
    events = api.client.events()
    newer = [event for event in events if event.number > after][-limit:]
    data = [_shown(event, mine=not api.keys or event.group == group) for event in newer]
    last = events[-1].number if events else 0
    return json_response({"object": "list", "data": data, "last": last})


def _shown(event: Event, *, mine: bool) -> dict[str, object]:
    """Return an event as JSON for a client; request ids are included only if `mine`."""
    return {
        "object": "event",
        "time": round(event.at, 3),
        **{name: getattr(event, name) for name in ("number", "kind", "level", "text", "replica", "rank")},
        "remedy": event.remedy or None,
        "model": event.model or None,
        "request_id": (event.request_id or None) if mine else None,
    }
