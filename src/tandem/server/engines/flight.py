"""One engine request on its way over replicas: what it would take to start it again elsewhere."""

from __future__ import annotations

import secrets
from typing import Protocol

import msgspec

from tandem.errors import RequestError
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest
from tandem.server.engines.subscription import Subscription

CLEAR = 8
"""Tokens beyond the point of loss that clear a request of having caused it."""


class Carrier(Protocol):
    """Whoever moves flights from replica to replica."""

    def arrived(self, flight: Flight, output: Output) -> None:
        """An output of the flight is here."""

    def failed(self, flight: Flight, error: RequestError) -> None:
        """Its replica refused it, or was lost."""


class Flight:
    """A request, the tokens that its client has, and where it is. Takes the engine's answers as a `Sink`."""

    def __init__(self, request: EngineRequest, subscription: Subscription, carrier: Carrier) -> None:
        """A seed is drawn where the client gave none, so that the text goes on alike on any replica."""
        params = request.params
        if params.seed is None and not params.greedy:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        self._request = msgspec.structs.replace(request, params=params)
        self._carrier = carrier
        self._sendings = 0
        self.subscription = subscription
        self.produced = list(request.produced)
        self.replica: int | None = None
        """Where it is; None between two replicas."""
        self.losses = 0
        """Replicas that died under it."""
        self.strikes = 0
        """Those of them in a row between which it did not get further."""
        self.lost_at: float | None = None
        """When it lost the last one, by the event loop's clock. It was accepted once: it is not turned away now because
        others are full."""
        self._died_at = -1
        self.refused_by: set[int] = set()
        """Replicas that would not have it."""

    @property
    def request_id(self) -> str:
        """The id that the api knows."""
        return self._request.request_id

    @property
    def wire_id(self) -> str:
        """The id that the replica knows: another one each time, as a slow engine may still be busy with the last."""
        return self.request_id if self._sendings == 1 else f"{self.request_id}+{self._sendings - 1}"

    @property
    def tokens(self) -> list[int]:
        """All that a replica has to compute before the next token: prompt, and output so far."""
        return [*self._request.prompt, *self.produced]

    @property
    def max_tokens(self) -> int:
        """Output limit, counted from the beginning."""
        return self._request.params.max_tokens

    def lose(self, now: float, *, died: bool) -> None:
        """Its replica is lost; `died` unless it was leaving anyway."""
        self.lost_at, self.replica = now, None
        self.refused_by.clear()
        if died:
            self.losses += 1
            self.strikes = 1 if self.acquitted else self.strikes + 1
            self._died_at = len(self.produced)

    @property
    def acquitted(self) -> bool:
        """It is further than when it lost its last replica, by more than can have been under way unseen."""
        return len(self.produced) > self._died_at + CLEAR

    def depart(self) -> str:
        """It is about to be sent (again): the id to use."""
        self._sendings += 1
        return self.wire_id

    def wire_request(self) -> EngineRequest:
        """What to send."""
        return msgspec.structs.replace(self._request, request_id=self.wire_id, produced=list(self.produced),
                                       strikes=self.strikes)

    def push(self, output: Output) -> None:
        """Take an output of the replica."""
        self.produced += output.tokens
        if self._sendings > 1:
            output = msgspec.structs.replace(output, request_id=self.request_id)
        self._carrier.arrived(self, output)

    def fail(self, error: RequestError) -> None:
        """Take the replica's refusal, or the news that it is lost."""
        self._carrier.failed(self, error)
