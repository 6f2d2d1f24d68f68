"""Which web pages may use a server that asks for no key: a browser hands any page's requests to this machine.

A page of another origin says so in `Origin`, and in `Sec-Fetch-Site` where a browser leaves `Origin` out, as for
images. One that has its own name point to this machine (DNS rebinding) has that name in `Host`. Only names that the
public DNS gives to people can be used for that, so others need not be listed.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers

from tandem.config.validation import is_loopback
from tandem.errors import RequestError
from tandem.server.failures import refused

PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".home.arpa", ".lan", ".home")
"""Ends of names that the public DNS does not know (RFC 6761, 6762 and 8375, ICANN's .internal; .lan and .home, which
many routers give, are delegated to nobody)."""
PORTS = {"http": 80, "https": 443}
WEB = tuple(PORTS)
UPLOAD, UPLOAD_PATH = "multipart/form-data", "/v1/files"
FORM = "application/x-www-form-urlencoded"


class Origins:
    """Hosts and pages that are let in without a key."""

    def __init__(self, listening: str, hosts: Collection[str], origins: Collection[str]) -> None:
        """`listening` is the address of this server, `hosts` are further names of it and `origins` pages, as set."""
        own = {listening.lower(), socket.gethostname().lower()}
        self._hosts = frozenset(host.lower() for host in hosts) | own
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    def check(self, headers: Headers) -> None:
        """Raises RequestError (403) for a host that is not this server's, and for a page that may not use it."""
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
        if name in self._hosts or "*" in self._hosts or _is_private(name):
            return True
        return any(host.startswith("*.") and name.endswith(host[1:]) for host in self._hosts)

    def _may(self, origin: str, host: str | None) -> bool:
        origin = origin.lower()
        scheme = origin.partition(":")[0]
        if "*" in self._origins or origin in self._origins:
            return True
        if scheme not in WEB:
            return origin != "null"  # an application or an extension: no page of the web has such an origin
        name, port = _split(origin)
        if is_loopback(name) or name.endswith(".localhost"):
            return True
        return host is not None and (name, port) == _split(f"{scheme}://{host.lower()}")


def check_content_type(method: str, headers: Headers, path: str = "") -> None:
    """Bodies must be JSON, not compressed, and say so: a page may send anything else anywhere without asking. Raises
    RequestError: 415. Files come as forms; which pages may send them is for `Origins` or the key to say.

    What `curl -d` says when it is told nothing is let pass, unless it comes from a page; so is silence.
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
    if kind == UPLOAD and path == UPLOAD_PATH:
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
    """Return whether no stranger can have the name in the public DNS: an address, a name without dots or of a private
    network."""
    if name.endswith(PRIVATE_SUFFIXES) or (name and "." not in name):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _split(url: str) -> tuple[str, int | None]:
    """Name and port of a host or an origin; an empty name for what is neither."""
    try:
        parts = urlsplit(url)
        if parts.username is not None or parts.path:
            return "", None  # `evil.com@localhost` is two names, and neither a host nor an origin
        return (parts.hostname or "").rstrip("."), parts.port or PORTS.get(parts.scheme)
    except ValueError:
        return "", None


def _refusal(what: str, flag: str, value: str, code: str) -> RequestError:
    error = refused(
        403, f"This server asks for no API key, and {what}; start it with {flag} {value}, or with --api-key-file.", code=code
    )
    error.kind = "permission_error"
    return error
