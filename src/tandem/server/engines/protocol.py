"""Who takes what an engine answers, how its loss is told, and how it stands."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from tandem.config.settings import Role
from tandem.errors import RequestError, UnavailableError
from tandem.protocol.control import Output


class EngineLost(UnavailableError):
    """The engine went away, or fell silent, with the request in it."""


class Departed(EngineLost):
    """The engine has let go of the request, which goes on elsewhere."""

    def __init__(self, positions: int) -> None:
        """`positions`: tokens, from the first, whose KV it has written to disk."""
        super().__init__("The engine has let go of the request, and no other takes it; please send it again.",
                         code="shutting_down")
        self.positions = positions


class Stranded(EngineLost):
    """The engine is there, but has been without its ranks for long; others can go on with the request."""

    def __init__(self) -> None:
        super().__init__("The engine has lost its ranks, and no other takes the request; please send it again.",
                         code="engine_unavailable")


class Sink(Protocol):
    """What takes the answers to one engine request."""

    def push(self, output: Output) -> None:
        """The next output."""

    def fail(self, error: RequestError) -> None:
        """No more will come."""

    def tried(self, *, resting: bool) -> None:
        """It may be what kills engines, and begins to run alone; or, `resting`, nothing runs yet, to see whether the
        engine dies without it."""


class ReplicaState(Struct, frozen=True):
    """One engine, as /health shows it."""

    replica: int
    state: str
    """The engine's own word, or `unreachable`."""
    detail: str
    ranks: int
    running: int
    queued: int
    outstanding_tokens: int
    """Work before it as the router counts it: prompt tokens to compute and output tokens to come."""
    kv_tokens_used: int
    kv_tokens_total: int
    restarts: int
    role: Role = "both"
    """What it is for: `prefill` computes long prompts, which go on at one that does not."""
