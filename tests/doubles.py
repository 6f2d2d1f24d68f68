"""Stand-ins for the callers of the api's dispatcher and router."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from tandem.errors import RequestError
from tandem.protocol.control import Output
from tandem.server.engines.router import Placement, Router


class Answers:
    """Collects what comes of requests, for one reader."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.error: RequestError | None = None
        self._news = asyncio.Event()

    def push(self, output: Output) -> None:
        self.outputs.append(output)
        self._news.set()

    def fail(self, error: RequestError) -> None:
        self.error = self.error or error
        self._news.set()

    def inputs_of(self, key: str) -> bytes:
        raise AssertionError(key)

    def tried(self, *, resting: bool) -> None:
        raise AssertionError(resting)

    async def get(self) -> list[Output]:
        """All outputs since the last call, at least one. Raises the error that ended them once all are read."""
        while not self.outputs and self.error is None:
            self._news.clear()
            await self._news.wait()
        if not self.outputs and self.error is not None:
            raise self.error
        outputs, self.outputs = self.outputs, []
        return outputs


class NamedRouter(Router):
    """A router whose placements are known by the names of their requests."""

    def __init__(self, **options: bool) -> None:
        super().__init__(**options)
        self.placements: dict[str, Placement] = {}

    def placed(self, name: str, tokens: Sequence[int], max_tokens: int, **more: Any) -> int | None:
        """Place a request; the number of its replica."""
        placement = self.place(tokens, max_tokens, **more)
        if placement is None:
            return None
        self.end(name)
        self.placements[name] = placement
        return placement.replica

    def advance(self, name: str, tokens: int) -> None:
        if name in self.placements:
            self.placements[name].advance(tokens)

    def end(self, name: str) -> None:
        if name in self.placements:
            self.placements.pop(name).end()

    def leave(self, replica: int) -> None:
        super().leave(replica)
        self.placements = {name: one for name, one in self.placements.items() if one.replica != replica}

    def leaves(self, name: str) -> bool:
        return name in self.placements and self.placements[name].leaves

    def kept(self, name: str) -> int:
        return self.placements[name].kept if name in self.placements else 0
