"""What one client has used lately: token buckets, and how many of its requests run. Pure."""

from __future__ import annotations

import math
from typing import Final

from tandem.config.keys import ClientLimits
from tandem.errors import OverloadedError

MINUTE_S = 60.0
RATE_LIMIT: Final = "rate_limit_exceeded"
"""Code of the error that says so."""


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


class Usage:
    """Buckets for the limits that the client has, and its running requests."""

    def __init__(self, limits: ClientLimits, now: float) -> None:
        self.limits = limits
        self.running = 0
        self.requests = Bucket(limits.requests_per_minute, now) if limits.requests_per_minute else None
        self.tokens = Bucket(limits.tokens_per_minute, now) if limits.tokens_per_minute else None

    def idle(self, now: float) -> bool:
        """True when it has used nothing that still counts."""
        buckets = [bucket for bucket in (self.requests, self.tokens) if bucket is not None]
        return not self.running and all(bucket.wait(math.inf, now) == 0 for bucket in buckets)


def require(bucket: Bucket | None, amount: int, what: str, name: str, now: float) -> None:
    """Raises OverloadedError, naming limit and remedy, when `amount` cannot be taken now."""
    wait = bucket.wait(amount, now) if bucket is not None else 0.0
    if bucket is None or wait <= 0:
        return
    left = max(math.floor(bucket.level(now)), 0)
    message = (f"Rate limit reached: the limit is {bucket.per_minute} {what} a minute ({name}), {left} are left "
               f"and {amount} are needed. Please try again in {duration(wait)}.")
    raise OverloadedError(message, retry_after=math.ceil(wait), code=RATE_LIMIT)


def duration(seconds: float) -> str:
    """As OpenAI writes it: 20ms, 1.5s, 6m0s."""
    milliseconds = math.ceil(seconds * 1000)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return (f"{minutes}m" if minutes else "") + f"{rest / 1000:g}s"
