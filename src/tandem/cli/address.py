"""Address and API key of the running server that a command queries; all commands use the same search order."""

from __future__ import annotations

import argparse
from urllib.parse import urlsplit

from tandem.cli.arguments import DEFAULT_URL
from tandem.config.api_keys import ClientLimits, read_key_file
from tandem.config.validation import is_loopback
from tandem.env import variable
from tandem.errors import UsageError
from tandem.launchers.host_facts import is_own
from tandem.supervision.record import DEFAULT_NAME, Background, Record, known_names
from tandem.system.http_client import ServerClient

VARIABLE = "TANDEM_BASE_URL"


def find_server(arguments: argparse.Namespace) -> ServerClient:
    """Return a client for the server that the options name, with its API key. Raises UsageError."""
    url = server_url(arguments)
    return ServerClient(url, api_key(arguments, url))


def server_url(arguments: argparse.Namespace) -> str:
    """Return the address of the server, without /v1. Raises UsageError.

    Order: `--url`, `--port`, `--name`, TANDEM_BASE_URL, the server of `tandem up`, port 8000 of this machine.
    """
    record = started() if (url := named_url(arguments)) is None else None
    return url or (DEFAULT_URL if record is None else record_url(record))


def named_url(arguments: argparse.Namespace) -> str | None:
    """Return the address given by the options or TANDEM_BASE_URL; None if neither gives one. Raises UsageError."""
    named = [
        flag
        for flag, value in (("--url", arguments.url), ("--port", arguments.server_port), ("--name", arguments.server_name))
        if value is not None
    ]
    if len(named) > 1:
        raise UsageError(f"{named[0]} and {named[1]} both name a server; give one", param="url")
    if arguments.url is not None:
        return checked_url(arguments.url)
    if arguments.server_port is not None:
        record = next((record for record in all_running() if record.port == arguments.server_port), None)
        return f"http://127.0.0.1:{arguments.server_port}" if record is None else record_url(record)
    if arguments.server_name is not None:
        record = running(arguments.server_name)
        if record is None:
            raise UsageError(
                f"--name {arguments.server_name}: no server of that name runs; `tandem status` shows those that do", param="name"
            )
        return record_url(record)
    text = variable(VARIABLE)
    return checked_url(text, VARIABLE) if text is not None else None


def started() -> Record | None:
    """Return the record of the background server with the default name, else of the only one; None otherwise."""
    if (record := running(DEFAULT_NAME)) is not None:
        return record
    servers = all_running()
    return servers[0] if len(servers) == 1 else None


def all_running() -> list[Record]:
    """Return the records of all running background servers."""
    return [record for name in known_names() if (record := running(name)) is not None]


def running(name: str) -> Record | None:
    """Return the record of a background server; None unless it runs. Raises UsageError for an invalid name."""
    place = Background(name)
    return place.record() if place.runs() else None


def record_url(record: Record) -> str:
    """Return the address of a background server for clients on this machine."""
    return local_url(record.scheme, record.host, record.port)


def local_url(scheme: str, host: str, port: int) -> str:
    """Return the address for clients on this machine of a server that listens at `host`, which may mean all addresses."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def checked_url(text: str, flag: str = "--url") -> str:
    """Return an address without /v1 and trailing slashes. Raises UsageError for a wrong port or a scheme that is not HTTP's."""
    if not text.startswith(("http://", "https://")):
        raise UsageError(f"{flag} {text}: must begin with http:// or https://", param="base_url")
    try:
        _ = urlsplit(text).port
    except ValueError:
        raise UsageError(f"{flag} {text}: must be like {DEFAULT_URL}, with a port of at most 65535", param="base_url") from None
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def local_port(url: str) -> int:
    """Return the port in `url`, which identifies the control socket of a server on this machine.

    Raises UsageError without a port, or for another machine's address.
    """
    parts = urlsplit(url)
    if parts.port is None:
        raise UsageError(f"{url}: name the port too", param="url")
    host = parts.hostname or ""
    if not (is_loopback(host) or is_own(host) or any(record_url(record) == url for record in all_running())):
        raise UsageError(
            f"{url}: {host} is no address of this machine; run the command on that machine, or give --port for a server here",
            param="url",
        )
    return parts.port


def api_key(arguments: argparse.Namespace, url: str) -> str:
    """Return the API key for the server at `url`; empty for none. Raises ConfigError.

    Order: the named file, the environment, the key file of the background server at `url`.
    """
    file, key = arguments.api_key_file, variable("TANDEM_API_KEY") or variable("OPENAI_API_KEY") or ""
    if file is None and not key:
        local = url.replace("://localhost", "://127.0.0.1", 1)
        file = next((record.api_key_file for record in all_running() if record_url(record) == local), None)
    return next(iter(read_key_file(file, ClientLimits(), label="--api-key-file"))) if file else key
