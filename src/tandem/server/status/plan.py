"""Routes of the planner: layouts of a served model over machines described by the client."""

from __future__ import annotations

import inspect
from typing import Annotated, get_args

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.errors import RequestError, UnavailableError
from tandem.planner.hardware import CHIPS, LINKS
from tandem.planner.hosts import host_specs
from tandem.planner.types import Goal
from tandem.server.acquire import find_model
from tandem.server.body import require_known
from tandem.server.context import get_api, get_group, unless_gone
from tandem.server.sse import json_response

router = APIRouter()

MAX_HOSTS = 8
"""Most machines in a request: the planner compares arrangements of all their subsets."""


@router.get("/v1/plan/choices")
async def choices(http: Request) -> Response:
    """Return the names of chips, links and goals for /v1/plan, with their bandwidths and latencies."""
    require_known(http.query_params, ())
    chips = [{"name": name, "bandwidth": chip.bandwidth, "apple": chip.apple} for name, chip in CHIPS.items()]
    links = [{"name": name, "bandwidth": link.bandwidth, "latency": link.latency} for name, link in LINKS.items()]
    body = {"chips": chips, "links": links, "goals": list(get_args(Goal)), "max_hosts": MAX_HOSTS}
    return json_response(body)


@router.get("/v1/plan")
async def plan_route(
    http: Request,
    hosts: Annotated[list[str], Query(description="NAME=MEMORY[:CHIP], as `tandem plan --hosts` takes it")],
    link: Annotated[list[str] | None, Query(description="as `tandem plan --link` takes it")] = None,
    context: Annotated[int | None, Query(ge=1)] = None,
    streams: Annotated[int, Query(ge=1, le=4096)] = 1,
    goal: Goal | None = None,
    model: Annotated[str | None, Query(description="which of several models")] = None,
) -> Response:
    """Compare layouts of a served model over machines, without loading the model."""
    api = get_api(http)
    api.quotas.enter(http.scope)
    require_known(http.query_params, [name for name in inspect.signature(plan_route).parameters if name != "http"])
    served = find_model(http, model)
    if not (longest := api.max_context(served)):
        raise UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
    if (count := len(host_specs(hosts))) > MAX_HOSTS:
        raise RequestError(f"hosts: {count} machines; name at most {MAX_HOSTS}", param="hosts")
    if context is not None and context > longest:
        raise RequestError(f"context: {context} is more than the {longest} tokens that are served", param="context")
    wished = served.settings.model
    task = {
        "model": wished.model or served.status().source,
        "revision": wished.revision,
        "hosts": hosts,
        "link": link or [],
        "context": context or min(8192, longest),
        "streams": streams,
        "goal": goal,
    }
    body = await unless_gone(http, api.workers.ask(get_group(http), "compare", task, bytes))
    return Response(body, media_type="application/json")
