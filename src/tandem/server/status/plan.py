"""The planner over HTTP: layouts of the served model on machines that the client names."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.config.options import nearest
from tandem.errors import RequestError
from tandem.planner.types import Goal
from tandem.server.context import get_api, get_group, unless_gone
from tandem.server.workers.tasks import Compare

router = APIRouter()

MAX_HOSTS = 8
"""The planner compares arrangements of all subsets of them."""


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
    """Compare the ways to spread a served model over machines."""
    api = get_api(http)
    api.admit(http)
    _require_known(http.query_params)
    served = await api.engage(http, model)
    status = served.status()
    if len(hosts) > MAX_HOSTS:
        raise RequestError(f"hosts: {len(hosts)} machines; name at most {MAX_HOSTS}", param="hosts")
    if context is not None and context > status.max_context:
        raise RequestError(f"context: {context} is more than the {status.max_context} tokens that are served",
                           param="context")
    wished = served.settings.model
    task = Compare(wished.model or status.source, wished.revision, hosts, link or [],
                   context or min(8192, status.max_context), streams, goal)
    body = await unless_gone(http, api.workers.ask(get_group(http), task, bytes))
    return Response(body, media_type="application/json")


def _require_known(names: Iterable[str]) -> None:
    """Raises RequestError for a query parameter that there is not: a layout for other wishes would mislead."""
    known = [name for name in inspect.signature(plan_route).parameters if name != "http"]
    for name in names:
        if name not in known:
            raise RequestError(f"There is no query parameter {name[:100]!r}{nearest(name[:100], known)}; there are: "
                               f"{', '.join(known)}.", param=name[:100])
