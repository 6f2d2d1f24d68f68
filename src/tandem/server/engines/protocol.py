"""What the api needs of the engine or engines behind it, and how their refusals look to clients."""

from __future__ import annotations

from typing import Protocol

from msgspec import Struct

from tandem.errors import (
    NotFoundError,
    OverloadedError,
    RequestError,
    ServerError,
    TimeoutExceeded,
    TooLargeError,
    UnavailableError,
)
from tandem.protocol.control import EngineStatus, Output, Refused
from tandem.protocol.events import Event


class EngineLost(UnavailableError):
    """The engine went away, or fell silent, with the request in it."""


class Departed(EngineLost):
    """The engine has let go of the request, which goes on elsewhere."""

    def __init__(self, positions: int) -> None:
        """`positions`: tokens, from the first, whose KV it has written to disk."""
        super().__init__("The engine has let go of the request, and no other takes it; please send it again.",
                         code="shutting_down")
        self.positions = positions


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


class Overview(Protocol):
    """All engines of a server, of one model or several. Belongs to the event loop that called `start`."""

    @property
    def status(self) -> EngineStatus | None:
        """State of the whole: sums of counts, all ranks; None before any engine has answered."""

    @property
    def alive(self) -> bool:
        """True while an engine is connected and answers."""

    async def start(self) -> None:
        """Begin to connect. No engine need be there."""

    async def close(self) -> None:
        """Tell the engines that this api is going. All subscriptions fail."""

    def check(self) -> EngineStatus:
        """The status of what takes requests. Raises UnavailableError when nothing does."""

    async def metrics(self, timeout: float = 2.0) -> bytes:
        """Metrics in Prometheus' text format; empty when nobody answers within `timeout` seconds."""

    async def refresh(self) -> None:
        """Have the status as of now, from engines that answer at once."""

    def replicas(self) -> list[ReplicaState]:
        """Each engine by itself."""

    def events(self) -> list[Event]:
        """What happened lately, the oldest first."""


def replica_state(replica: int, status: EngineStatus | None, *, alive: bool, state: str | None = None,
                  outstanding_tokens: int = 0, detail: str = "") -> ReplicaState:
    """One engine as /health shows it, from its last status; `state` wins over the engine's own. `detail` is why it does
    not answer, if it does not."""
    if status is None or not alive:
        return ReplicaState(replica, state or "unreachable", detail, len(status.ranks) if status else 0, 0, 0,
                            outstanding_tokens, 0, 0, status.restarts if status else 0)
    return ReplicaState(replica, state or status.state, status.detail, len(status.ranks), status.running,
                        status.queued, outstanding_tokens, status.kv_tokens_used, status.kv_tokens_total,
                        status.restarts)


def refusal(message: Refused) -> RequestError:
    """The error that a `Refused` of the engine stands for."""
    if message.status == 429:
        return OverloadedError(
            message.message, retry_after=message.retry_after or 1.0, code=message.code or "overloaded"
        )
    if message.status == 503:
        return UnavailableError(
            message.message, retry_after=message.retry_after or 2.0, code=message.code or "engine_unavailable"
        )
    classes: dict[int, type[RequestError]] = {404: NotFoundError, 413: TooLargeError, 504: TimeoutExceeded}
    fallback = RequestError if 400 <= message.status < 500 else ServerError
    error = classes.get(message.status, fallback)(message.message, param=message.param, code=message.code)
    error.status = message.status if 400 <= message.status < 600 else 500
    return error
