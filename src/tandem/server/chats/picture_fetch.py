"""Fetch pictures that requests name by http(s) URLs, from hosts of --image-hosts at public addresses.

The address that is checked is the one that is connected to, so a name that resolves to another one later has no effect.
Proxies of the environment are not used, as they would resolve names themselves.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
import ssl
from collections.abc import Collection, Sequence
from functools import lru_cache
from urllib.parse import quote, urljoin

import h11

from tandem.server.chats.pictures import DATA, MAX_BYTES, WEB, check_url
from tandem.server.chats.texts import off_loop
from tandem.server.openai.messages import GivenPicture
from tandem.server.waiting import end_tasks
from tandem.text.pictures import refusal
from tandem.version import __version__

TIMEOUT_S = 10.0
"""Seconds for all pictures of a request, which are fetched at the same time."""
CONNECT_S = 3.0
"""Seconds for one of a host's addresses to accept a connection."""
MAX_REDIRECTS = 3
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_SAFE = "%/:=&?~+!$,;'@()*[]"
_tls = lru_cache(maxsize=1)(ssl.create_default_context)


def is_public(address: str) -> bool:
    """Return whether an IP address is one of the public internet: not private, loopback, link-local or reserved."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip in _NAT64:
        ip = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
    if isinstance(ip, ipaddress.IPv6Address) and (ip.ipv4_mapped or ip.sixtofour or ip.is_site_local):
        return False
    return ip.is_global and not ip.is_multicast


async def fetch_pictures(pictures: Sequence[GivenPicture], hosts: Collection[str], most: int) -> list[GivenPicture]:
    """Return the pictures, those at http(s) URLs as data URIs. `hosts`: --image-hosts. `most`: bytes of all that are fetched.

    Raises RequestError.
    """
    fetches = _Fetches(hosts, most)
    tasks = [asyncio.ensure_future(fetches.data_uri(number, one.url)) for number, one in enumerate(pictures, 1)]
    try:
        urls = await asyncio.gather(*tasks)
    finally:
        await end_tasks(*tasks)
    return [picture._replace(url=url) for picture, url in zip(pictures, urls, strict=True)]


class _Fetches:
    """Pictures of one request that are fetched."""

    def __init__(self, hosts: Collection[str], most: int) -> None:
        self._hosts, self._most = hosts, most
        self._taken = 0

    async def data_uri(self, number: int, url: str) -> str:
        """Return the picture `number` at `url` as a data URI; one that is not at an http(s) URL as it is."""
        if not url[:6].lower().startswith(WEB):
            return url
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for _ in range(MAX_REDIRECTS + 1):
                    found = await self._get(number, url)
                    if isinstance(found, bytes):
                        return f"data:;base64,{(await off_loop(True, base64.b64encode, found)).decode()}"
                    url = urljoin(url, found)
        except TimeoutError:
            why = f"is not there after {TIMEOUT_S:g} seconds"
        except (OSError, ValueError, h11.ProtocolError) as error:
            why = f"cannot be fetched ({' '.join(str(error).split())[:200] or type(error).__name__})"
        else:
            why = f"is redirected more than {MAX_REDIRECTS} times"
        raise refusal(number, why, f"send its bytes as {DATA}")

    async def _get(self, number: int, url: str) -> bytes | str:
        """Return the bytes of a picture, or the URL that it is redirected to."""
        parts, host = check_url(number, url, self._hosts)
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        reader, writer = await self._connect(number, host, port, parts.scheme == "https")
        try:
            target = quote(parts.path or "/", _SAFE) + (f"?{quote(parts.query, _SAFE)}" if parts.query else "")
            at = (f"[{host}]" if ":" in host else host) + (f":{parts.port}" if parts.port else "")
            headers = {"Host": at, "User-Agent": f"tandem/{__version__}", "Accept": "image/*", "Connection": "close"}
            connection = h11.Connection(h11.CLIENT)
            asks = connection.send(h11.Request(method="GET", target=target, headers=list(headers.items())))
            writer.write((asks or b"") + (connection.send(h11.EndOfMessage()) or b""))
            return await self._answer(number, host, connection, reader)
        finally:
            writer.transport.abort()

    async def _connect(
        self, number: int, host: str, port: int, secure: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the first address of a host that accepts. Raise RequestError if one of them is not public."""
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = list(dict.fromkeys(str(one[4][0]) for one in found))
        if not all(map(is_public, addresses)):
            raise refusal(number, f"is at {host}, which has an address that is not public", f"send its bytes as {DATA}")
        tls = await off_loop(True, _tls) if secure else None
        failed: OSError = OSError(f"{host} has no address")
        for address in addresses:
            try:
                async with asyncio.timeout(CONNECT_S):
                    return await asyncio.open_connection(address, port, ssl=tls, server_hostname=host if secure else None)
            except OSError as error:
                failed = OSError(str(error) or f"{host} does not answer")
        raise failed

    async def _answer(self, number: int, host: str, connection: h11.Connection, reader: asyncio.StreamReader) -> bytes | str:
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(2**16))
            elif isinstance(event, h11.Response):
                headers = {name.decode().lower(): value.decode("latin-1") for name, value in event.headers}
                if event.status_code in (301, 302, 303, 307, 308) and "location" in headers:
                    return headers["location"]
                if event.status_code != 200:
                    raise refusal(number, f"is answered with status {event.status_code} by {host}", "correct its URL")
                kind = headers.get("content-type", "").partition(";")[0].strip().lower()
                if not kind.startswith("image/") and not kind.endswith("/octet-stream"):
                    raise refusal(number, f"has the content type {kind[:80]!r} at {host}", "name a URL of a picture")
            elif isinstance(event, h11.Data):
                self._taken += len(event.data)
                if len(body) + len(event.data) > MAX_BYTES:
                    raise refusal(number, f"is larger than {MAX_BYTES // 2**20} MiB", "send it smaller")
                if self._taken > self._most:
                    raise refusal(number, f"makes more than {self._most} bytes with the others (--max-body-mb)", "send fewer")
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                return bytes(body)
