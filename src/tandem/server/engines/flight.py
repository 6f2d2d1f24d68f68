"""Requests under way: each on its way over replicas, and the answers to those that belong together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import msgspec

from tandem.errors import RequestError
from tandem.protocol.control import Output
from tandem.protocol.request import EngineRequest
from tandem.protocol.suspicion import Suspicion

if TYPE_CHECKING:
    from tandem.server.engines.dispatcher import Dispatcher


class Subscription:
    """Collects `Output`s between the client's reader and one HTTP request.

    Everything that ends a wait goes through here (outputs, a failure, a nudge by a timer), so that one future per wait
    is all that it costs and outputs that arrived together are taken together.
    """

    def __init__(self, request_ids: Iterable[str], abort: Callable[[str], object]) -> None:
        """`abort` stops one of the requests, unless it is over."""
        self._request_ids = tuple(request_ids)
        self._abort = abort
        self._items: list[Output] = []
        self.error: RequestError | None = None
        """Error that ended it, if one did."""
        self._nudged = False
        self._waiter: asyncio.Future[None] | None = None

    def push(self, output: Output) -> None:
        """Take one output; called by the client's reader."""
        self._items.append(output)
        self._wake()

    def fail(self, error: RequestError) -> None:
        """End the subscription: outputs that are here already can still be read, then `get` raises `error`."""
        if self.error is None:
            self.error = error
        self._wake()

    def nudge(self) -> None:
        """Let a waiting `get` return an empty list."""
        self._nudged = True
        self._wake()

    def close(self) -> None:
        """Abort whatever is still running. Safe to call again."""
        for request_id in self._request_ids:
            self._abort(request_id)

    async def get(self) -> list[Output]:
        """All outputs since the last call, at least one; empty only after a `nudge`.

        Raises the `RequestError` given to `fail`.
        """
        while not self._items and self.error is None and not self._nudged:
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._nudged = False
        if not self._items and self.error is not None:
            raise self.error
        items, self._items = self._items, []
        return items

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Flight:
    """A request, the tokens that its client has, and where it is. Takes the engine's answers as a `Sink`."""

    def __init__(self, request: EngineRequest, subscription: Subscription, dispatcher: Dispatcher,
                 only: int | None = None) -> None:
        """A seed is drawn where the client gave none, so that the text goes on alike on any replica. `only`: no other
        replica will do."""
        self.only = only
        params = request.params
        if params.seed is None and not params.greedy:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        self.request = msgspec.structs.replace(request, params=params)
        self._dispatcher = dispatcher
        self._sendings = 0
        self._heard = False
        """Its replica has brought something."""
        self.subscription = subscription
        self.produced = list(request.produced)
        self.replica: int | None = None
        """Where it is; None between two replicas."""
        self.losses = 0
        """Replicas that died under it."""
        self.suspicion = Suspicion()
        """Whether it may be what killed them."""
        self.trial: bool | None = None
        """Its replica tries it alone; False while nothing runs there, to see whether that dies without it."""
        self.judged = ""
        """The sending whose loss has been judged."""
        self.kept = 0
        """Of its tokens, from the first, its last replica has written so many to disk, when it let go of it."""
        self.written: dict[str, int] = {}
        """The same by store."""
        self.left: tuple[int, str] | None = None
        """The replica that let go of it, and the id that it knew, until it goes on elsewhere."""
        self.leaves = False
        """Its replica lets go of it once its prompt is computed."""
        self.perhaps_kept = 0
        """So many may be there, as a replica that was to let go of it was lost before."""
        self.lost_at: float | None = None
        """When it lost the last one, or followed others of its HTTP request, by the event loop's clock. It was accepted
        once: it is not turned away now because others are full."""
        self.refused_by: set[int] = set()
        """Replicas that would not have it."""

    @property
    def request_id(self) -> str:
        """The id that the api knows."""
        return self.request.request_id

    @property
    def cache_key(self) -> str:
        """Its key, which is its client's own; empty for none."""
        return f"{self.request.group}:{self.request.cache_key}" if self.request.cache_key else ""

    @property
    def wire_id(self) -> str:
        """The id that the replica knows: another one each time, as a slow engine may still be busy with the last."""
        return self.request_id if self._sendings == 1 else f"{self.request_id}+{self._sendings - 1}"

    @property
    def tokens(self) -> list[int]:
        """All that a replica has to compute before the next token: prompt, and output so far."""
        return [*self.request.prompt, *self.produced]

    @property
    def may_leave(self) -> bool:
        """Its prompt may be computed by one replica, and another go on: nobody has begun so far."""
        request = self.request
        return (request.on_disk and not self.kept and self.only is None and not self.suspicion.suspect
                and request.pooling is None and not request.warms and request.params.prompt_logprobs is None)

    def lose(self, now: float, *, died: bool, kept: int = 0) -> None:
        """Its replica is lost; `died` unless it was leaving anyway. So many of its tokens it has `kept` on disk."""
        self.kept = max(self.kept, kept)
        if self.leaves and not kept:
            self.perhaps_kept = len(self.request.prompt)
        self.lost_at, self.replica = now, None
        self.refused_by.clear()
        self.losses += died

    @property
    def computed(self) -> int:
        """Positions that its replica has surely computed."""
        return len(self.request.prompt) + len(self.produced) if self._heard else 0

    def blame(self, *, alone: bool) -> None:
        """Its replica died while it worked on it."""
        self.suspicion.died(self.computed, len(self.request.prompt) + len(self.produced), alone=alone)

    def depart(self) -> EngineRequest:
        """It is about to be sent (again): what to send."""
        self._sendings += 1
        self.trial, self._heard, self.leaves = None, False, False
        return msgspec.structs.replace(self.request, request_id=self.wire_id, produced=list(self.produced),
                                       suspicion=msgspec.structs.replace(self.suspicion))

    def push(self, output: Output) -> None:
        """Take an output of the replica."""
        self.produced += output.tokens
        self._heard = True
        if self._sendings > 1:
            output = msgspec.structs.replace(output, request_id=self.request_id)
        self._dispatcher.arrived(self, output)

    def tried(self, *, resting: bool) -> None:
        """Take note that it runs alone now, or will when its replica has stood idle and lived."""
        self.trial = not resting

    def fail(self, error: RequestError) -> None:
        """Take the replica's refusal, or the news that it is lost."""
        self._dispatcher.failed(self, error)
