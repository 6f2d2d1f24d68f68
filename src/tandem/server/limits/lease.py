"""What one admitted request takes of its client's quota."""

from __future__ import annotations

from collections.abc import Callable

from tandem.server.limits.usage import Usage


class Lease:
    """One request that was admitted."""

    def __init__(self, client: Usage, clock: Callable[[], float]) -> None:
        self._client = client
        self._clock = clock
        self._over = False
        self.weight = client.limits.weight
        """Its share of the engine, beside those of others."""

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
