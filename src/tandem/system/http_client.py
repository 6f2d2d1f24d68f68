"""HTTP client for commands that query a running server."""

from __future__ import annotations

import json
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import cast

from tandem.errors import UsageError
from tandem.json_types import JsonObject
from tandem.printable import printable

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
Body = Mapping[str, object] | bytes | None
"""JSON to send: an object, or encoded bytes; None sends no body."""


@dataclass(frozen=True)
class ServerClient:
    """A running server and its API key. Proxies of the environment are ignored: they would see key and prompts."""

    url: str
    """Address without /v1, such as http://127.0.0.1:8000."""
    key: str = field(default="", repr=False)

    def open(self, path: str, body: Body = None, *, timeout_s: float | None, method: str | None = None) -> HTTPResponse:
        """Send a request and return the response, which the caller closes. `timeout_s` None means no timeout.

        Raises OSError (urllib.error.HTTPError included) and ValueError.
        """
        data = json.dumps(body).encode() if isinstance(body, Mapping) else body
        headers = {} if data is None else {"Content-Type": "application/json"}
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        return cast("HTTPResponse", _DIRECT.open(request, timeout=timeout_s))

    def get(self, path: str, *, timeout_s: float | None = 10.0, method: str = "GET", body: Body = None) -> bytes:
        """Return the body of an answer, for /health also one with status 503. Raises UsageError with a one-line message."""
        with self._failures(path):
            try:
                with self.open(path, body, timeout_s=timeout_s, method=method) as response:
                    return response.read()
            except urllib.error.HTTPError as error:
                if error.code != 503 or path != "/health":
                    raise
                with error:
                    return error.read()

    def get_json(self, path: str, *, timeout_s: float | None = 10.0, method: str = "GET", body: Body = None) -> JsonObject:
        """Return the answer's JSON object with control characters removed from its strings.

        Raises UsageError, and ValueError when the body is no JSON object.
        """
        found = json.loads(self.get(path, timeout_s=timeout_s, method=method, body=body))
        if not isinstance(found, dict):
            raise ValueError(f"{path} answers with no JSON object")
        return {printable(name): _shown(item) for name, item in found.items()}

    def events(self, path: str, body: Body) -> Iterator[JsonObject]:
        """Yield the events of a streamed answer. Closing the iterator cancels the request. Raises UsageError."""
        with self._failures(path), self.open(path, body, timeout_s=None) as response:
            for line in response:
                data = line.removeprefix(b"data:").strip() if line.startswith(b"data:") else b""
                if data and data != b"[DONE]":
                    event = _event(data, self.url + path)
                    if error := event.get("error"):
                        raise UsageError(str(error.get("message", error) if isinstance(error, dict) else error))
                    yield event

    def models(self) -> list[str]:
        """Return the names of the server's models. Raises UsageError."""
        try:
            return [str(model["id"]) for model in self.get_json("/v1/models")["data"]]
        except (ValueError, LookupError, TypeError):
            raise UsageError(f"{self.url} does not answer as a server of models; is --url right?", param="url") from None

    @contextmanager
    def _failures(self, path: str) -> Iterator[None]:
        """Context manager that turns connection failures and HTTP errors into UsageError."""
        try:
            yield
        except urllib.error.HTTPError as error:
            with error:
                reason = _message(error)
            hint = (
                "; give --api-key-file, or set TANDEM_API_KEY or OPENAI_API_KEY"
                if error.code == 401
                else f": {reason}"
                if reason
                else ""
            )
            raise UsageError(f"{self.url}{path} answers with status {error.code}{hint}", param="base_url") from None
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)
            unknown = isinstance(cause, ssl.SSLCertVerificationError)
            hint = "set SSL_CERT_FILE to its certificate" if unknown else "is the server up, is --url right?"
            cause = getattr(cause, "strerror", None) or cause
            raise UsageError(f"{self.url} cannot be reached: {cause}; {hint}", param="base_url") from None


def _event(data: bytes, where: str) -> JsonObject:
    """Return an event's JSON object. Raises UsageError if it is none."""
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise UsageError(f"{where} streams an event that is no JSON object; is --url right?", param="base_url")
    return event


def _message(error: urllib.error.HTTPError) -> str:
    """Return the message of an OpenAI error object; empty for any other body."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, LookupError, TypeError, OSError):
        return ""


def _shown(value: object) -> object:
    if isinstance(value, dict):
        return {printable(name): _shown(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_shown(item) for item in value]
    return printable(value) if isinstance(value, str) else value
