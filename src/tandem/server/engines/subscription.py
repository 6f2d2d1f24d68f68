"""The answers to one or more engine requests, as they come in."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from tandem.errors import RequestError
from tandem.protocol.control import Output


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
        """What ended it."""
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
