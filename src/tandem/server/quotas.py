"""Limits per client: concurrent requests, requests per minute, tokens per minute. Not thread-safe: use on one event loop."""

from __future__ import annotations

import ipaddress
import math
import time
from collections.abc import Callable, Mapping
from typing import Final

from starlette.types import Scope

from tandem.config.api_keys import ClientLimits
from tandem.errors import OverloadedError

MINUTE_S = 60.0
RATE_LIMIT: Final = "rate_limit_exceeded"
"""Error code of a request above a limit."""
FORGET_ABOVE = 1024
"""Number of clients above which idle ones are dropped."""
BUSY_RETRY_S = 1.0
"""`Retry-After`, in seconds, for too many concurrent requests: their end cannot be predicted."""

RATE_HEADERS: Final = tuple(
    f"x-ratelimit-{kind}-{name}" for name in ("requests", "tokens") for kind in ("limit", "remaining", "reset")
)


def group_of(address: str) -> str:
    """Return the client group of an IP address, for connection limits, quotas and fair queueing.

    The group is the IPv4 address, or the /64 network of an IPv6 client. Other text is returned unchanged.
    """
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(known, ipaddress.IPv4Address):
        return address
    return str(known.ipv4_mapped or known.packed[:8].hex())


class Bucket:
    """Token bucket with a capacity of one minute. Output tokens, unknown in advance, may overdraw it.

    The state is the time at which the bucket is full again (generic cell rate algorithm).
    """

    def __init__(self, what: str, per_minute: int | None) -> None:
        """`what`: the unit, such as "tokens"; with `per_minute` None the bucket is always full."""
        self.what = what
        self.per_minute = per_minute
        self._unit_s = MINUTE_S / per_minute if per_minute else 0.0
        self._full_at = -math.inf

    def left(self, now: float) -> int:
        """Return the whole units left at time `now` (seconds); 0 when overdrawn or without a limit."""
        return max(math.floor(round((MINUTE_S - self.full_in(now)) / self._unit_s, 3)), 0) if self._unit_s else 0

    def full_in(self, now: float) -> float:
        """Return the seconds until the bucket is full."""
        return max(self._full_at - now, 0.0)

    def wait(self, amount: int, now: float) -> float:
        """Return the seconds, rounded to ms, until `amount` can be taken; an amount above the capacity needs a full bucket."""
        return max(round(self.full_in(now) - max(MINUTE_S - amount * self._unit_s, 0.0), 3), 0.0)

    def take(self, amount: int, now: float) -> None:
        """Take `amount`, even if that overdraws the bucket."""
        self._full_at = now + self.full_in(now) + amount * self._unit_s

    def refusal(self, amount: int, now: float) -> OverloadedError:
        """Return the error for an `amount` that exceeds what is left; the message has the limit and the wait."""
        wait = self.wait(amount, now)
        message = (
            f"Rate limit reached: the limit is {self.per_minute} {self.what} a minute ({self.what}_per_minute), "
            f"{self.left(now)} are left and {amount} are needed. Please try again in {duration(wait)}."
        )
        return OverloadedError(message, retry_after=math.ceil(wait), code=RATE_LIMIT)


class Usage:
    """Buckets and number of running requests of one client."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.running = 0
        self.requests = Bucket("requests", limits.requests_per_minute)
        self.tokens = Bucket("tokens", limits.tokens_per_minute)

    def idle(self, now: float) -> bool:
        """Return whether no request runs and all buckets are full."""
        return not (self.running or self.requests.full_in(now) or self.tokens.full_in(now))


def duration(seconds: float) -> str:
    """Return a duration as OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


class Lease:
    """An admitted request's use of its client's limits."""

    def __init__(self, client: Usage, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._over = False
        self.meters = bool(client.limits.tokens_per_minute)
        """True if the client has a token limit; else `spend` has no effect."""
        self.weight = client.limits.weight
        """Weight in fair queueing."""

    def prompt(self, tokens: int) -> None:
        """Take the prompt's tokens from the bucket. Raises OverloadedError if too few are left."""
        now, bucket = self._clock(), self._client.tokens
        if bucket.wait(tokens, now):
            raise bucket.refusal(tokens, now)
        bucket.take(tokens, now)

    def spend(self, tokens: int) -> None:
        """Take output tokens, even if that overdraws the bucket."""
        self._client.tokens.take(tokens, self._clock())

    def end(self) -> None:
        """Stop counting the request as running. Idempotent."""
        self._client.running -= not self._over
        self._over = True


class Quotas:
    """Quotas of all client groups: an API key each, or a client address without keys."""

    def __init__(
        self, default: ClientLimits, groups: Mapping[str, ClientLimits], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`default`: limits of groups not in `groups`; `clock`: returns seconds."""
        self._default = default
        self._limits = dict(groups)
        self._clock = clock
        self._clients: dict[str, Usage] = {}

    def enter(self, scope: Scope) -> None:
        """Admit the request of an HTTP scope; a second call has no effect. Raises OverloadedError.

        A job's request is not counted again: `accept` has counted it.
        """
        if "tandem.lease" not in scope:
            scope["tandem.metered"] = True
            scope["tandem.lease"] = self.admit(scope.get("tandem.group", ""), again="tandem.job" in scope)

    def accept(self, group: str, *, waits: bool) -> None:
        """Count a request that runs later; call `admit` with `again` then. Raises OverloadedError.

        `waits`: it may queue, so only the limit of requests per minute is checked.
        """
        self._count(group, running=not waits, requests=True, tokens=not waits)

    def give_back(self, group: str) -> None:
        """Undo `accept` for a request that will not run."""
        now = self._clock()
        self._client(group, now).requests.take(-1, now)

    def admit(self, group: str, *, again: bool = False) -> Lease:
        """Admit a request before its tokens are known; `again`: `accept` has counted it.

        Raises OverloadedError, with limit and remedy, if a limit of the group is reached.
        """
        client = self._count(group, running=True, requests=not again, tokens=True)
        client.running += 1
        return Lease(client, self._clock)

    def _count(self, group: str, *, running: bool, requests: bool, tokens: bool) -> Usage:
        """Count a request, checking the limits selected by the flags. Raises OverloadedError if one is reached."""
        now = self._clock()
        client = self._client(group, now)
        limit = client.limits.max_concurrent_requests
        if running and limit is not None and client.running >= limit:
            raise OverloadedError(
                f"Rate limit reached: {client.running} requests are running, the limit is {limit} at "
                "once (max_concurrent_requests).",
                retry_after=BUSY_RETRY_S,
                code=RATE_LIMIT,
            )
        for bucket, counts in ((client.requests, requests), (client.tokens, tokens)):
            if counts and bucket.wait(1, now):
                raise bucket.refusal(1, now)
        client.requests.take(int(requests), now)
        return client

    def headers(self, group: str) -> list[tuple[bytes, bytes]]:
        """Return OpenAI's x-ratelimit-* headers for the group's limits."""
        now = self._clock()
        client = self._client(group, now)
        headers: list[tuple[bytes, bytes]] = []
        for bucket in (client.requests, client.tokens):
            if bucket.per_minute:
                values = {"limit": bucket.per_minute, "remaining": bucket.left(now), "reset": duration(bucket.full_in(now))}
                headers += [(f"x-ratelimit-{kind}-{bucket.what}".encode(), str(value).encode()) for kind, value in values.items()]
        return headers

    def _client(self, group: str, now: float) -> Usage:
        if group not in self._clients:
            if len(self._clients) >= FORGET_ABOVE:
                self._clients = {name: client for name, client in self._clients.items() if not client.idle(now)}
            self._clients[group] = Usage(self._limits.get(group, self._default))
        return self._clients[group]
