"""Middleware around all HTTP requests: authentication, origin checks, metrics, error responses."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tandem.errors import AuthenticationError, RequestError
from tandem.server.context import Api, key_digest, key_group
from tandem.server.failures import ClientGone, error_response, internal_error
from tandem.server.fields import told
from tandem.server.origins import Origins, check_content_type
from tandem.server.quotas import group_of
from tandem.server.status import page

if TYPE_CHECKING:
    from tandem.server.generation import Running

logger = logging.getLogger(__name__)

IGNORED_HEADER = b"x-tandem-ignored-fields"
"""Response header that lists request fields without effect."""
OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/ping"}) | page.PATHS
"""Paths that need no API key; /health returns less without one."""
POLLED_PATHS = frozenset({"/metrics", "/v1/status", "/v1/events"})
"""Further paths that are asked again and again: they have a line in the log only when they fail."""


class Gate:
    """ASGI middleware that authenticates, counts and answers errors (BaseHTTPMiddleware would hide disconnects)."""

    def __init__(self, app: ASGIApp, api: Api) -> None:
        self._app = app
        self._api = api
        self._digests = [key_digest(key) for key in api.keys]
        server = api.settings.server
        self._origins = Origins(server.host, server.allowed_host, (*server.allowed_origin, *server.cors_origin))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request; other scopes pass through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["method"] == "HEAD":  # handled as GET; h11 sends only the headers
            scope = {**scope, "method": "GET"}
        request_id = scope["tandem.request_id"] = _request_id(Headers(scope=scope).get("x-request-id", ""))
        started = time.monotonic()
        status = 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more: list[tuple[bytes, bytes]] = []
                if scope.get("tandem.metered"):
                    more += self._api.quotas.headers(scope["tandem.group"])
                if ignored := scope.get("tandem.ignored"):
                    more.append((IGNORED_HEADER, told(ignored).encode()))
                own = dict(message.get("headers", ())).get(b"x-request-id")
                more += [] if own else [(b"x-request-id", request_id.encode())]
                more.append((b"request-id", own or request_id.encode()))  # Anthropic's name for it
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        scope["tandem.send"] = watched
        self._api.metrics.in_flight.inc()
        try:
            self._admit(scope)
            await self._app(scope, receive, watched)
        except RequestError as error:
            await _refuse(error, scope, receive, watched)
        except Exception as error:  # noqa: BLE001 - outermost handler: no request may take the server down
            failure = internal_error(error, f"{scope['method']} {_route(scope)}")
            if status and "tandem.stream" not in scope:
                # Too late for an error response; a broken connection marks the answer as incomplete.
                raise ConnectionAbortedError("response broken off after an internal error") from None
            await _refuse(failure, scope, receive, watched)
        finally:
            self._api.release(scope)
            self._api.metrics.in_flight.dec()
            self._account(scope, status, time.monotonic() - started)

    def _admit(self, scope: Scope) -> None:
        """Identify the client and set `tandem.group` and `tandem.trusted` in `scope`.

        Raises RequestError for a missing or wrong key, a disallowed origin or an unsupported content type.
        """
        client = scope.get("client")
        scope["tandem.group"] = group_of(client[0]) if client else ""
        scope["tandem.trusted"] = True
        headers = Headers(scope=scope)
        free = scope["path"] in OPEN_PATHS or (scope["path"] == "/" and page.prefers_page(headers.get("accept", "")))
        if not self._digests:
            if not free:
                self._origins.check(headers)
                check_content_type(scope["method"], headers, scope["path"])
            return
        presented = _presented_key(headers)
        known = False
        if presented is not None:
            digest = key_digest(presented)
            # Compare all keys in constant time, against timing attacks.
            known = sum(hmac.compare_digest(digest, other) for other in self._digests) > 0
            scope["tandem.group"] = key_group(presented)
        scope["tandem.trusted"] = known
        if known or free:
            check_content_type(scope["method"], headers, scope["path"])
            return
        what = "No API key given" if presented is None else "Incorrect API key provided"
        message = f"{what}; send it as 'Authorization: Bearer <key>' or 'x-api-key: <key>'."
        raise AuthenticationError(message, code="invalid_api_key")

    def _account(self, scope: Scope, status: int, seconds: float) -> None:
        route = _route(scope)
        method = scope["method"] if scope["method"] in ("GET", "POST", "HEAD", "OPTIONS") else "other"
        self._api.metrics.requests.labels(route, method, str(status)).inc()
        self._api.metrics.seconds.labels(route).observe(seconds)
        if scope["path"] not in OPEN_PATHS and (status >= 400 or scope["path"] not in POLLED_PATHS):
            record_request(self._api, scope, status, seconds)


def record_request(api: Api, scope: Scope, status: int, seconds: float) -> None:
    """Log one line about a request that has ended after `seconds`, and export its trace, as far as the settings ask for them."""
    logs = api.settings.server.log_requests and logger.isEnabledFor(logging.INFO)
    if not logs and api.traces is None:
        return
    running: Running | None = scope.get("tandem.running")
    error: RequestError | None = scope.get("tandem.error") or (running.error if running is not None else None)
    address = scope.get("client")
    known = api.keys and scope.get("tandem.trusted", True)
    facts: dict[str, object] = {
        "request_id": scope.get("tandem.request_id"),
        "client": api.key_names.get(scope["tandem.group"]) if known else address and address[0],
        "method": scope["method"],
        "path": quote(scope["path"][:200], errors="replace"),
        "status": status,
        "seconds": round(seconds, 3),
        "error": error and (error.code or error.kind),
        "job": scope.get("tandem.seed"),
    }
    if running is not None:
        facts |= {
            "id": running.request_id,
            "model": running.model,
            "replica": running.replica,
            "queue_s": round(running.timings[0][2].queue_s, 3) if running.timings else None,
            "first_token_s": round(running.first_at - running.started_at, 3) if running.first_at else None,
            "prompt_tokens": running.prompt_tokens,
            "cached_tokens": running.cached_tokens,
            "completion_tokens": running.completion_tokens,
        }
    facts = {name: value for name, value in facts.items() if value is not None}
    if api.traces is not None:
        facts["trace_id"] = api.traces.record(scope, _route(scope), facts, running, seconds)
    if not logs:
        return
    rest = " ".join(f"{name}={value}" for name, value in facts.items() if name not in ("method", "path", "status"))
    logger.info("%s %s %d %s", scope["method"], facts["path"], status, rest, extra={"fields": facts})


async def _refuse(error: RequestError, scope: Scope, receive: Receive, send: Send) -> None:
    """Send `error` as the response, or as the end of a stream that has begun."""
    write, scope["tandem.error"] = scope.get("tandem.stream"), error
    if write is None:
        await error_response(error, scope)(scope, receive, send)
    elif not isinstance(error, ClientGone):
        await send({"type": "http.response.body", "body": write(error), "more_body": False})


def _request_id(given: str) -> str:
    """Return the client's request id if it has at most 128 plain characters, else a new one."""
    return given if re.fullmatch(r"[\w.:/+=@-]{1,128}", given, re.ASCII) else f"req_{uuid.uuid4().hex}"


def _presented_key(headers: Headers) -> str | None:
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key")


def _route(scope: Scope) -> str:
    """Return the route's pattern, as the number of distinct paths (metric labels) would be unbounded."""
    return str(getattr(scope.get("route"), "path", None) or scope.get("tandem.route", "unmatched"))
