"""Routes under /v1/cache: list, drop and warm cached prefixes."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.errors import UnavailableError
from tandem.protocol.cached_prefixes import CacheReport
from tandem.server.acquire import acquire
from tandem.server.body import parse, require_known
from tandem.server.cache.schemas import WarmRequest
from tandem.server.cache.warming import warm
from tandem.server.context import get_api
from tandem.server.openapi import documented
from tandem.server.sse import json_response

router = APIRouter()

Model = Annotated[str | None, Query(description="of several models, the one that it is about")]


@router.get("/v1/cache")
async def kept(http: Request, model: Model = None) -> Response:
    """List the cached prefixes in memory and on disk, by replica, of each loaded model."""
    require_known(http.query_params, ("model",))
    api = get_api(http)
    among = [api.find(model)] if model is not None else api.served
    data = [
        {"model": served.name, "replicas": [_replica(index, report) for index, report in (await served.client.cache()).items()]}
        for served in among
    ]
    return json_response({"object": "cache", "data": data})


@router.delete("/v1/cache")
async def drop(
    http: Request,
    model: Model = None,
    tier: Annotated[Literal["memory", "all"], Query(description="what to let go: memory alone, or disks too")] = "all",
) -> Response:
    """Drop the cached prefixes of a model at each replica; by default also those on disk, including other servers'."""
    require_known(http.query_params, ("model", "tier"))
    api = get_api(http)
    served = api.find(model)
    served.client.check()
    reports = await served.client.cache(drop=tier)
    for index, report in reports.items():
        _refuse(index, report)
    body = {
        "object": "cache.dropped",
        "model": served.name,
        "tier": tier,
        "replicas": [
            {"replica": index, "memory_tokens": report.dropped_tokens, "disk_bytes": report.dropped_bytes}
            for index, report in reports.items()
        ],
    }
    return json_response(body)


@router.post("/v1/cache/warm", openapi_extra=documented(WarmRequest))
async def warm_route(http: Request) -> Response:
    """Compute and cache a prompt at every replica, so that requests with this prefix are answered sooner."""
    fields = await parse(http, WarmRequest)
    served = await acquire(http, fields.model)
    return json_response(await warm(http, served, fields))


def _refuse(index: int, report: CacheReport) -> None:
    """Raise UnavailableError if replica `index` failed to drop its prefixes."""
    if report.trouble:
        raise UnavailableError(f"Replica {index} has not dropped its prefixes: {report.trouble}.")


def _replica(index: int, report: CacheReport) -> dict[str, object]:
    disk = None if report.disk is None else msgspec.to_builtins(report.disk)
    return {
        "replica": index,
        "detail": report.trouble,
        "prefix_cache": report.serves,
        "kv_disk": report.kv_disk,
        "memory": {
            "prefixes": report.count,
            "bytes": report.nbytes,
            **{name: getattr(report, name) for name in ("tokens", "limit_tokens", "queries", "hits", "hit_tokens")},
        },
        "disk": disk,
        "prefixes": msgspec.to_builtins(report.prefixes),
    }
