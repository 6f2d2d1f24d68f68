"""What happened to the server, and why: /v1/events."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from tandem.protocol.events import KEPT, Event
from tandem.server.body import require_known
from tandem.server.context import get_api, get_group
from tandem.server.sse import encode_json

router = APIRouter()


@router.get("/v1/events")
async def events_route(
    http: Request,
    after: Annotated[int, Query(ge=0, description="number of the last event that the client has")] = 0,
    limit: Annotated[int, Query(ge=1, le=KEPT, description="only the latest so many")] = KEPT,
) -> Response:
    """Ranks and replicas lost and replaced, models loaded and unloaded, and so on, the oldest first."""
    require_known(http.query_params, ("after", "limit"))
    api, group = get_api(http), get_group(http)
    found = api.client.events()
    newer = [one for one in found if one.number > after][-limit:]
    data = [_shown(one, mine=not api.keys or one.group == group) for one in newer]
    last = found[-1].number if found else 0
    return Response(encode_json({"object": "list", "data": data, "last": last}), media_type="application/json")


def _shown(event: Event, *, mine: bool) -> dict[str, Any]:
    """For a client; the id of a request is for its own."""
    return {
        "object": "event",
        "number": event.number,
        "time": round(event.at, 3),
        "kind": event.kind,
        "level": event.level,
        "text": event.text,
        "remedy": event.remedy or None,
        "replica": event.replica,
        "rank": event.rank,
        "model": event.model or None,
        "request_id": (event.request_id or None) if mine else None,
    }
