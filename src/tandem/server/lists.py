"""Pagination of lists as in OpenAI's API."""

from __future__ import annotations

from fastapi import Request

from tandem.errors import NotFoundError, invalid
from tandem.json_types import JsonObject


def page(items: list[JsonObject], http: Request, *, newest_first: bool, most: int = 100, usual: int = 20) -> JsonObject:
    """Return a page of `items` (oldest first) by the query parameters `order`, `limit` and `after`.

    `most`, `usual`: maximum and default of `limit`. Raises RequestError naming the invalid parameter.
    """
    query = http.query_params
    order, limit = query.get("order") or ("desc" if newest_first else "asc"), query.get("limit", str(usual))
    if order not in ("asc", "desc"):
        raise invalid("order", f"Invalid 'order': '{order[:40]}' is neither 'asc' nor 'desc'.")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= most and len(limit) < 9):
        raise invalid("limit", f"Invalid 'limit': '{limit[:40]}' is not a number from 1 to {most}.")
    if order == "desc":
        items = items[::-1]
    if after := query.get("after"):
        place = next((index for index, item in enumerate(items) if item["id"] == after), None)
        if place is None:
            raise NotFoundError(f"There is nothing with the id '{after[:100]}' in this list.", param="after", code="not_found")
        items = items[place + 1 :]
    shown = items[: int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(items) > len(shown),
    }
