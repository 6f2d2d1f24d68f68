"""What each client may use: requests at once, requests a minute, tokens a minute. Belongs to one event loop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from tandem.config.keys import ClientLimits
from tandem.errors import OverloadedError
from tandem.protocol.request import EngineRequest

MINUTE_S = 60.0
FORGET_ABOVE = 1024
"""Clients from which on those are forgotten that have used nothing lately."""
BUSY_RETRY_S = 1.0
"""What a client is told that has too many requests at once: when one of them ends is not known."""

_CODE: Final = "rate_limit_exceeded"
RATE_HEADERS: Final = tuple(f"x-ratelimit-{kind}-{name}" for name in ("requests", "tokens")
                            for kind in ("limit", "remaining", "reset"))


class Bucket:
    """A token bucket: holds a minute's worth, and fills evenly. Output, which nobody can foresee, may overdraw it."""

    def __init__(self, per_minute: int, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._at = now

    def level(self, now: float) -> float:
        """What is in it; below 0 when it is overdrawn."""
        self._level = min(self._level + (now - self._at) * self.per_minute / MINUTE_S, float(self.per_minute))
        self._at = now
        return self._level

    def wait(self, amount: float, now: float) -> float:
        """Seconds until `amount` can be taken; what is more than a minute's worth waits until it is full."""
        missing = min(amount, self.per_minute) - self.level(now)
        return max(missing, 0.0) * MINUTE_S / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Take it, whatever is there."""
        self._level = self.level(now) - amount


class _Client:
    def __init__(self, limits: ClientLimits, now: float) -> None:
        self.limits = limits
        self.running = 0
        self.requests = Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self.tokens = Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None

    def idle(self, now: float) -> bool:
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.running and all(bucket.wait(math.inf, now) == 0 for bucket in buckets)


class Lease:
    """One request that was admitted."""

    def __init__(self, client: _Client, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._over = False

    def prompt(self, tokens: int) -> None:
        """The prompt has so many tokens. Raises OverloadedError when its client may not use them now."""
        now = self._clock()
        _check(self._client.tokens, tokens, "tokens", "tokens_per_minute", now)
        self.spend(tokens)

    def spend(self, tokens: int) -> None:
        """Tokens are used, whatever is left."""
        if self._client.tokens is not None:
            self._client.tokens.take(tokens, self._clock())

    def end(self) -> None:
        """The request is over. Safe to call again."""
        self._client.running -= not self._over
        self._over = True


class Quotas:
    """Admits requests, group by group: a group is an API key, or a client's address where there are no keys."""

    def __init__(self, default: ClientLimits, groups: Mapping[str, ClientLimits],
                 clock: Callable[[], float] = time.monotonic) -> None:
        """`default` holds for groups that are not in `groups`."""
        self._default = default
        self._limits = dict(groups)
        self._clock = clock
        self._clients: dict[str, _Client] = {}

    def admit(self, group: str, *, again: bool = False) -> Lease:
        """Count a request, before anything is known of it; with `again` one that has been counted as it came.

        Raises OverloadedError, naming limit and remedy, when the group has used up what it may.
        """
        now = self._clock()
        client = self._client(group, now)
        self._check_running(client)
        if client.requests is not None and not again:
            _check(client.requests, 1, "requests", "requests_per_minute", now)
        _check(client.tokens, 1, "tokens", "tokens_per_minute", now)
        if client.requests is not None and not again:
            client.requests.take(1, now)
        client.running += 1
        return Lease(client, self._clock)

    @staticmethod
    def _check_running(client: _Client) -> None:
        limit = client.limits.max_concurrent_requests
        if limit is not None and client.running >= limit:
            raise OverloadedError(f"Rate limit reached: {client.running} requests are running, the limit is {limit} at "
                                  "once (max_concurrent_requests).", retry_after=BUSY_RETRY_S, code=_CODE)

    def weighted(self, group: str, requests: Sequence[EngineRequest]) -> list[EngineRequest]:
        """The requests with their group's weight."""
        weight = self._limits.get(group, self._default).weight
        return [replace(request, weight=weight) for request in requests]

    def headers(self, group: str) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit-* headers for the limits that the group has."""
        now = self._clock()
        client = self._client(group, now)
        headers: list[tuple[bytes, bytes]] = []
        for name, bucket in (("requests", client.requests), ("tokens", client.tokens)):
            if bucket is not None:
                remaining = max(math.floor(bucket.level(now)), 0)
                values = {"limit": bucket.per_minute, "remaining": remaining,
                          "reset": duration(bucket.wait(math.inf, now))}
                headers += [(f"x-ratelimit-{kind}-{name}".encode(), str(value).encode())
                            for kind, value in values.items()]
        return headers

    def _client(self, group: str, now: float) -> _Client:
        if group not in self._clients:
            if len(self._clients) >= FORGET_ABOVE:
                self._clients = {name: one for name, one in self._clients.items() if not one.idle(now)}
            self._clients[group] = _Client(self._limits.get(group, self._default), now)
        return self._clients[group]


def _check(bucket: Bucket | None, amount: int, what: str, name: str, now: float) -> None:
    wait = bucket.wait(amount, now) if bucket is not None else 0.0
    if bucket is None or wait <= 0:
        return
    left = max(math.floor(bucket.level(now)), 0)
    message = (f"Rate limit reached: the limit is {bucket.per_minute} {what} a minute ({name}), {left} are left "
               f"and {amount} are needed. Please try again in {duration(wait)}.")
    raise OverloadedError(message, retry_after=math.ceil(wait), code=_CODE)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
