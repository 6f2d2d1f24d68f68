"""The planner over HTTP: layouts of the served model on machines that the client names."""

from __future__ import annotations

from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.checkpoints.files import ModelFiles
from tandem.checkpoints.resolve import resolve
from tandem.errors import RequestError, UsageError
from tandem.models.description import describe
from tandem.planner.as_json import plan_json
from tandem.planner.experts import read_experts
from tandem.planner.hosts import read_hosts, read_links
from tandem.planner.plan import plan
from tandem.planner.types import Goal, NothingFits
from tandem.planner.types import Request as PlanRequest
from tandem.server.context import get_api
from tandem.server.sse import encode_json

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
    served = await get_api(http).engage(http, model)
    status = served.status()
    if len(hosts) > MAX_HOSTS:
        raise RequestError(f"hosts: {len(hosts)} machines; name at most {MAX_HOSTS}", param="hosts")
    if context is not None and context > status.max_context:
        raise RequestError(f"context: {context} is more than the {status.max_context} tokens that are served",
                           param="context")
    wanted = PlanRequest(context=context or min(8192, status.max_context), streams=streams, goal=goal)
    wished = served.settings.model
    try:
        files = await to_thread.run_sync(
            lambda: resolve(wished.model or status.source, revision=wished.revision, weights=False))
        body = await to_thread.run_sync(_compare, files, hosts, link or [], wanted)
    except UsageError as error:
        raise RequestError(error.message, param=error.param) from error
    return Response(encode_json(body), media_type="application/json")


def _compare(files: ModelFiles, hosts: list[str], link: list[str], wanted: PlanRequest) -> dict[str, object]:
    cluster = read_hosts(hosts, None)
    links, notes = read_links(link, cluster)
    description = describe(files)
    try:
        answer = plan(description, cluster.machines, links, wanted, experts=read_experts(files, description))
    except NothingFits as refusal:
        answer = refusal.plan
    return {**plan_json(answer, cluster.machines), "notes": [*cluster.notes, *notes]}
