"""What each client may use: requests at once, requests a minute, tokens a minute. Belongs to one event loop."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import Scope

from tandem.config.keys import ClientLimits
from tandem.errors import OverloadedError
from tandem.server.limits.usage import RATE_LIMIT, Lease, Usage, duration

FORGET_ABOVE = 1024
"""Clients from which on those are forgotten that have used nothing lately."""
BUSY_RETRY_S = 1.0
"""Retry-After of a client that has too many requests at once: when one of them ends is not known."""

RATE_HEADERS: Final = tuple(f"x-ratelimit-{kind}-{name}" for name in ("requests", "tokens")
                            for kind in ("limit", "remaining", "reset"))


def group_of(address: str) -> str:
    """Key of the client at an address, for connections, quotas and fair shares.

    It is an IPv4 address, or the /64 network that a client of IPv6 has for itself; a text that is no address is its
    own key.
    """
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    return str(known.ipv4_mapped or known.packed[:8].hex())


class Quotas:
    """Admits requests, group by group: a group is an API key, or a client's address where there are no keys."""

    def __init__(self, default: ClientLimits, groups: Mapping[str, ClientLimits],
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`default` holds for groups that are not in `groups`."""
        self._default = default
        self._limits = dict(groups)
        self._clock = clock
        self._clients: dict[str, Usage] = {}

    def enter(self, scope: Scope) -> None:
        """Count the request of that scope before anything is done for it; the second call has no effect.

        A job's was counted when it was accepted. Raises OverloadedError.
        """
        if "tandem.lease" not in scope:
            scope["tandem.metered"] = True
            scope["tandem.lease"] = self.admit(scope.get("tandem.group", ""), again="tandem.job" in scope)

    def accept(self, group: str, *, waits: bool) -> None:
        """Count a request that is admitted later, with `again`; one that `waits` may find other limits used up.

        Raises OverloadedError.
        """
        self._count(group, running=not waits, requests=True, tokens=not waits)

    def give_back(self, group: str) -> None:
        """Uncount a request that was accepted, and is none."""
        now = self._clock()
        self._client(group, now).requests.take(-1, now)

    def admit(self, group: str, *, again: bool = False) -> Lease:
        """Count a request, before anything is known of it; with `again` one that has been counted as it came.

        Raises OverloadedError, naming limit and remedy, when the group has used up what it may.
        """
        client = self._count(group, running=True, requests=not again, tokens=True)
        client.running += 1
        return Lease(client, self._clock)

    def _count(self, group: str, *, running: bool, requests: bool, tokens: bool) -> Usage:
        """Count a request, unless one of these limits is used up: then it raises OverloadedError."""
        now = self._clock()
        client = self._client(group, now)
        limit = client.limits.max_concurrent_requests
        if running and limit is not None and client.running >= limit:
            raise OverloadedError(f"Rate limit reached: {client.running} requests are running, the limit is {limit} at "
                                  "once (max_concurrent_requests).", retry_after=BUSY_RETRY_S, code=RATE_LIMIT)
        for bucket, counts in ((client.requests, requests), (client.tokens, tokens)):
            if counts and bucket.wait(1, now):
                raise bucket.refusal(1, now)
        client.requests.take(int(requests), now)
        return client

    def headers(self, group: str) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers for the limits that the group has."""
        now = self._clock()
        client = self._client(group, now)
        headers: list[tuple[bytes, bytes]] = []
        for bucket in (client.requests, client.tokens):
            if bucket.per_minute:
                values = {"limit": bucket.per_minute, "remaining": bucket.left(now),
                          "reset": duration(bucket.full_in(now))}
                headers += [(f"x-ratelimit-{kind}-{bucket.what}".encode(), str(value).encode())
                            for kind, value in values.items()]
        return headers

    def _client(self, group: str, now: float) -> Usage:
        if group not in self._clients:
            if len(self._clients) >= FORGET_ABOVE:
                self._clients = {name: one for name, one in self._clients.items() if not one.idle(now)}
            self._clients[group] = Usage(self._limits.get(group, self._default))
        return self._clients[group]
