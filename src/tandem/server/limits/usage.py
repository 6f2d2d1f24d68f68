"""What one client has used lately: token buckets, and how many of its requests run. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from tandem.config.keys import ClientLimits
from tandem.errors import OverloadedError

MINUTE_S = 60.0
RATE_LIMIT: Final = "rate_limit_exceeded"
"""Code of the error that says so."""


class Bucket:
    """A token bucket: holds a minute's worth, and fills evenly. Output, which nobody can foresee, may overdraw it.

    It is kept as the time at which it is full again (the generic cell rate algorithm).
    """

    def __init__(self, what: str, per_minute: int | None) -> None:
        """For `what` ("tokens"); without a limit it is always full."""
        self.what = what
        self.per_minute = per_minute
        self._unit_s = MINUTE_S / per_minute if per_minute else 0.0
        self._full_at = -math.inf

    def left(self, now: float) -> int:
        """Return the whole units that are left; 0 when it is overdrawn, or has no limit."""
        return max(math.floor(round((MINUTE_S - self.full_in(now)) / self._unit_s, 3)), 0) if self._unit_s else 0

    def full_in(self, now: float) -> float:
        """Seconds until it is full."""
        return max(self._full_at - now, 0.0)

    def wait(self, amount: int, now: float) -> float:
        """Seconds until `amount` can be taken, to the millisecond; more than a minute's worth waits for all of it."""
        return max(round(self.full_in(now) - max(MINUTE_S - amount * self._unit_s, 0.0), 3), 0.0)

    def take(self, amount: int, now: float) -> None:
        """Take it, whatever is there."""
        self._full_at = now + self.full_in(now) + amount * self._unit_s

    def refusal(self, amount: int, now: float) -> OverloadedError:
        """Why `amount` cannot be taken now; names limit and remedy."""
        wait = self.wait(amount, now)
        message = (f"Rate limit reached: the limit is {self.per_minute} {self.what} a minute ({self.what}_per_minute), "
                   f"{self.left(now)} are left and {amount} are needed. Please try again in {duration(wait)}.")
        return OverloadedError(message, retry_after=math.ceil(wait), code=RATE_LIMIT)


class Usage:
    """A client's buckets, and its running requests."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self.running = 0
        self.requests = Bucket("requests", limits.requests_per_minute)
        self.tokens = Bucket("tokens", limits.tokens_per_minute)

    def idle(self, now: float) -> bool:
        """True when it has used nothing that still counts."""
        return not (self.running or self.requests.full_in(now) or self.tokens.full_in(now))


def duration(seconds: float) -> str:
    """Write a duration in OpenAI's form: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"


class Lease:
    """One request that was admitted."""

    def __init__(self, client: Usage, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._over = False
        self.meters = bool(client.limits.tokens_per_minute)
        """True if the client's tokens are limited, so that `spend` matters."""
        self.weight = client.limits.weight
        """Share of the engine beside other clients, > 0."""

    def prompt(self, tokens: int) -> None:
        """The prompt has so many tokens. Raises OverloadedError when its client may not use them now."""
        now, bucket = self._clock(), self._client.tokens
        if bucket.wait(tokens, now):
            raise bucket.refusal(tokens, now)
        bucket.take(tokens, now)

    def spend(self, tokens: int) -> None:
        """Tokens are used, whatever is left."""
        self._client.tokens.take(tokens, self._clock())

    def end(self) -> None:
        """The request is over. Safe to call again."""
        self._client.running -= not self._over
        self._over = True
