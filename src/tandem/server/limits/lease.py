"""What one admitted request takes of its client's quota."""

from __future__ import annotations

from collections.abc import Callable

from tandem.server.limits.usage import Usage, require


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
        now = self._clock()
        require(self._client.tokens, tokens, "tokens", "tokens_per_minute", now)
        self.spend(tokens)

    def spend(self, tokens: int) -> None:
        """Tokens are used, whatever is left."""
        if self._client.tokens is not None:
            self._client.tokens.take(tokens, self._clock())

    def end(self) -> None:
        """The request is over. Safe to call again."""
        self._client.running -= not self._over
        self._over = True
