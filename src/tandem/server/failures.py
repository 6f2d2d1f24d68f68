"""Errors as HTTP responses, in OpenAI's envelope `{"error": {"message", "type", "param", "code"}}`, in Anthropic's, or in
Ollama's."""

from __future__ import annotations

import logging
import re
import traceback

import msgspec
from fastapi import Request
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Scope

from tandem.errors import AuthenticationError, NotFoundError, OverloadedError, RequestError, ServerError, UnavailableError
from tandem.json_types import JsonObject
from tandem.log import Seldom

logger = logging.getLogger(__name__)
seldom = Seldom(logger)

CANCELLED = "request_cancelled"
"""Error code of a cancelled request."""
ANTHROPIC_PATH = "/v1/messages"
OLLAMA_PATH = "/api/"
AUDIO_PATH = "/v1/audio/"
"""Prefix of paths without a route, whose 404 names a server that has them."""
ELSEWHERE = {
    AUDIO_PATH: "Tandem serves text; mlx-audio (python -m mlx_audio.server) serves /v1/audio of speech models.",
    "/api/create": "There are no Modelfiles; the options of `tandem serve` set a model's template, sampling and adapter.",
    "/api/copy": "`tandem serve` gives a model another name by --served-name, or by --extra-models NAME=MODEL.",
}
"""Remedies for paths that are not there, by the path's beginning."""
_ANTHROPIC = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""Anthropic's error types, by HTTP status."""
_TOO_LONG = re.compile(r"maximum context length is (\d{1,12}) tokens\. .* resulted in (?:at least |more than )?(\d{1,12}) tokens")


class ClientGone(RequestError):
    """The client closed the connection: the request must stop, but no response is sent. 499 is nginx's status for it."""

    status = 499
    kind = "client_disconnected"


def refused(status: int, message: str, *, param: str | None = None, code: str | None = None) -> RequestError:
    """Return a RequestError with the HTTP status `status`."""
    error = RequestError(message, param=param, code=code)
    error.status = status
    return error


def cancelled() -> RequestError:
    """Return the error (409) for a cancelled request."""
    return refused(409, "The request was cancelled.", code=CANCELLED)


def envelope(error: RequestError) -> JsonObject:
    """Return OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def anthropic_envelope(error: RequestError) -> JsonObject:
    """Return Anthropic's error object. A too long prompt gets Anthropic's wording, which clients match."""
    status, message = _anthropic_status(error), error.message
    if error.code == "context_length_exceeded" and (long := _TOO_LONG.search(message)):
        context, tokens = map(int, long.groups())
        message = f"prompt is too long: {max(tokens, context + 1)} tokens > {context} maximum"
    kind = _ANTHROPIC.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def _anthropic_status(error: RequestError) -> int:
    return 529 if error.status == 503 or (error.status == 429 and error.code == "overloaded") else error.status


def speaks_anthropic(scope: Scope) -> bool:
    """Return whether the client expects Anthropic's format, by path or by an `anthropic-version` header."""
    return scope["path"].startswith(ANTHROPIC_PATH) or any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_response(error: RequestError, scope: Scope | None = None) -> Response:
    """Return the HTTP response for `error`, in Anthropic's or Ollama's format if `scope` asks for it, else OpenAI's.

    Overload and unavailability get a Retry-After header.
    """
    headers: dict[str, str] = {}
    if scope is not None:
        scope["tandem.error"] = error
    if isinstance(error, OverloadedError | UnavailableError):
        headers["retry-after"] = str(max(1, round(error.retry_after)))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # the rest of the body is not read
    if scope is not None and scope["path"].startswith(OLLAMA_PATH):
        return Response(msgspec.json.encode({"error": error.message}), error.status, headers, "application/json")
    if scope is None or not speaks_anthropic(scope):
        return Response(msgspec.json.encode(envelope(error)), error.status, headers, "application/json")
    body = {**anthropic_envelope(error), "request_id": scope.get("tandem.request_id")}
    return Response(msgspec.json.encode(body), _anthropic_status(error), headers, "application/json")


def unexpected(error: BaseException | None, where: str, follows: str) -> None:
    """Log an unexpected exception, rate-limited by traceback. `where`: the failed part; `follows`: the consequence.

    Only the stack frames are logged: the message of a library's exception may quote a prompt.
    """
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip() if error is not None else ""
    name = type(error).__name__
    seldom.log(logging.ERROR, "unexpected %s in %s; %s; please report it\n%s", name, where, follows, frames, kind=frames or where)


def internal_error(error: BaseException, where: str) -> ServerError:
    """Log an unexpected exception and return a generic error (500) for the client."""
    unexpected(error, where, "it ends with status 500, all else goes on")
    return ServerError("Internal server error", code="internal_error")


def _from_http_exception(error: HTTPException, request: Request) -> RequestError:
    if error.status_code == 404:
        path = request.url.path
        instead = next((f". {text}" for start, text in ELSEWHERE.items() if path.startswith(start)), "")
        likely = {f"/v1{path}", path.removeprefix("/v1")} - {path}
        if meant := [route.path for route in request.app.routes if isinstance(route, Route) and route.path in likely]:
            instead = f". There is {meant[0]}: check whether the client's base URL should end with /v1."
        return NotFoundError(f"Unknown request URL: {request.method} {path}{instead}", code="unknown_url")
    if error.status_code == 405:
        message = f"Method {request.method} is not allowed for {request.url.path}"
        return refused(405, message, code="method_not_allowed")
    return refused(error.status_code, str(error.detail))


async def refuse_route(request: Request, error: Exception) -> Response:
    """Return the response for a routing error such as 404 or 405 (an exception handler). `Gate` handles RequestError."""
    assert isinstance(error, HTTPException)
    response = error_response(_from_http_exception(error, request), request.scope)
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response
