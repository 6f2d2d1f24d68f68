"""Static files of the web page at /ui. There is no build step, and no file comes from another host."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import Response

from tandem.errors import NotFoundError

router = APIRouter(include_in_schema=False)

_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FILES = {file.name: file for file in (Path(__file__).parents[1] / "ui").rglob("*") if file.suffix in _TYPES}
"""Files of the page, by name; ui/vendored/VENDORED.md lists third-party ones."""
PATHS = frozenset({"/ui", "/ui/", *(f"/ui/{name}" for name in FILES)})
"""Paths of the page. They need no API key: the page prompts for it and gets all data from the API."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def prefers_page(accept: str) -> bool:
    """Return whether an Accept header lists HTML before JSON, as browsers do."""
    kinds = [kind.split(";")[0].strip().lower() for kind in accept.split(",")]
    return "text/html" in kinds and "application/json" not in kinds[: kinds.index("text/html")]


@router.get("/ui")
@router.get("/ui/")
async def page() -> Response:
    """Return the page's HTML."""
    return file_response("index.html")


@router.get("/ui/{name}")
async def part(name: str) -> Response:
    """Return a file of the page."""
    if name not in FILES:
        raise NotFoundError("The page has no such file.", code="unknown_url")
    return file_response(name)


def file_response(name: str) -> Response:
    """Return a file of the page, with the headers that bound what it may do."""
    return Response(_read(name), media_type=f"{_TYPES[Path(name).suffix]}; charset=utf-8", headers=_HEADERS)


@cache
def _read(name: str) -> bytes:
    return FILES[name].read_bytes()
