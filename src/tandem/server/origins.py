"""Checks of `Origin` and `Host` for servers without API keys, as any web page can send requests to this machine.

Browsers send a page's origin in `Origin`, or `Sec-Fetch-Site` where `Origin` is absent, as for images. DNS rebinding (a
page's own name that resolves to this machine) shows in `Host`. It needs a name in public DNS, so private names need
not be listed.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tandem.config.validation import is_among, is_loopback
from tandem.errors import RequestError
from tandem.server.failures import AUDIO_PATH, refused

PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".home")
"""Domain suffixes absent from public DNS (RFC 6761, 6762 and 8375, ICANN's .internal; .lan and .home, which many routers
assign, are not delegated)."""
PORTS = {"http": 80, "https": 443}
WEB = tuple(PORTS)
UPLOAD, UPLOAD_PATH = "multipart/form-data", "/v1/files"
FORM = "application/x-www-form-urlencoded"


class Origins:
    """Host names and web origins that may use the server without a key."""

    def __init__(self, listening: str, hosts: Collection[str], origins: Collection[str]) -> None:
        """`listening`: address of this server; `hosts`: its further names (--allowed-host); `origins`: allowed origins."""
        own = {listening.lower(), socket.gethostname().lower()}
        self._hosts = frozenset(host.lower() for host in hosts) | own
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    def check(self, headers: Headers) -> None:
        """Raise RequestError (403) for a `Host` that is not this server's, or a page of a disallowed origin."""
        host, origin = headers.get("host"), headers.get("origin")
        if host is not None and not self._is_own(_split(f"//{host}")[0]):
            raise _refusal(
                f"the host {host[:200]!r} is not known as a name of this server",
                "--allowed-host",
                _split(f"//{host}")[0] or "NAME",
                "host_not_allowed",
            )
        site = headers.get("sec-fetch-site")
        if origin is None and site in ("cross-site", "same-site") and "*" not in self._origins:
            raise _refusal(
                f"pages of other origins must say theirs (Sec-Fetch-Site is {site}, Origin is missing)",
                "--allowed-origin",
                "ORIGIN",
                "origin_not_allowed",
            )
        if origin is not None and not self._may(origin, host):
            raise _refusal(
                f"pages of the web origin {origin[:200]!r} may not use it",
                "--allowed-origin",
                origin[:200] if origin != "null" else "ORIGIN",
                "origin_not_allowed",
            )

    def _is_own(self, name: str) -> bool:
        return "*" in self._hosts or _is_private(name) or is_among(name, self._hosts)

    def _may(self, origin: str, host: str | None) -> bool:
        origin = origin.lower()
        scheme = origin.partition(":")[0]
        if "*" in self._origins or origin in self._origins:
            return True
        if scheme not in WEB:
            return origin != "null"  # an application or a browser extension, not a web page
        name, port = _split(origin)
        if is_loopback(name) or name.endswith(".localhost"):
            return True
        return host is not None and (name, port) == _split(f"{scheme}://{host.lower()}")


def check_content_type(method: str, headers: Headers, path: str = "") -> None:
    """Raise RequestError (415) unless a body is uncompressed and declared as JSON.

    A web page may send other types to any host without a CORS preflight. Exceptions: forms for files and audio, no
    content type, and the default of `curl -d`, unless a page sent it.
    """
    content_type = headers.get("content-type")
    if method not in ("POST", "PUT", "PATCH"):
        return
    if (encoding := headers.get("content-encoding", "").strip().lower()) not in ("", "identity"):
        raise refused(
            415,
            f"Unsupported content encoding: {encoding[:200]!r}. Send the body as it is, without the header 'Content-Encoding'.",
            code="unsupported_content_encoding",
        )
    if content_type is None:
        return
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json" or (kind.startswith("application/") and kind.endswith("+json")):
        return
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return
    if kind == UPLOAD and (path == UPLOAD_PATH or path.startswith(AUDIO_PATH)):
        return
    if kind == FORM and "origin" not in headers:
        return
    raise refused(
        415,
        f"Unsupported content type: {content_type[:200]!r}. Send the body as JSON, with the header "
        "'Content-Type: application/json'.",
        code="unsupported_content_type",
    )


def _is_private(name: str) -> bool:
    """Return whether `name` cannot exist in public DNS: an IP address, a name without dots or with a private suffix."""
    if name.endswith(PRIVATE_SUFFIXES) or (name and "." not in name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _split(url: str) -> tuple[str, int | None]:
    """Return the host name and port of a `//host` or an origin; ("", None) if invalid."""
    try:
        parts = urlsplit(url)
        if parts.username is not None or parts.path:
            return "", None  # such as `evil.com@localhost`
        return (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return "", None


def _refusal(what: str, flag: str, value: str, code: str) -> RequestError:
    error = refused(
        403, f"This server asks for no API key, and {what}; start it with {flag} {value}, or with --api-key-file.", code=code
    )
    error.kind = "permission_error"
    return error
