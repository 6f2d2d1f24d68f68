"""One engine as the api knows it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tandem.config.settings import Role
from tandem.errors import UnavailableError
from tandem.protocol.supervisor import ReplicaInfo
from tandem.server.engines.client import EngineClient
from tandem.server.engines.protocol import ReplicaState

NOBODY = "The engine is not reachable (it is starting or has gone); try again shortly."


@dataclass
class Member:
    """An engine among the replicas of a model."""

    client: EngineClient
    info: ReplicaInfo | None = None
    """What the supervisor last said of it, if there is one."""
    leaves: bool = False
    """It was told to let go of what it has."""
    without_ranks: float | None = None
    """Since when its ranks have been gone, by the event loop's clock."""

    @property
    def role(self) -> Role:
        """What it is for."""
        return "both" if self.info is None else self.info.role

    @property
    def draining(self) -> bool:
        """It takes nothing more, and is to leave."""
        return self.info is not None and self.info.state == "draining"

    @property
    def state(self) -> str:
        """As the router is to take it: the engine's own word, `draining` or `silent`."""
        status = self.client.status
        if status is None or not self.client.alive:
            return "silent"
        return "draining" if self.draining else status.state

    def shown(self, replica: int, outstanding_tokens: int) -> ReplicaState:
        """As /health shows it, from its last status; the supervisor's word counts where that says more than its own."""
        status, alive = self.client.status, self.client.alive
        told = None if self.info is None or self.info.state == "running" else self.info.state
        if status is None or not alive:
            return ReplicaState(replica, told or "unreachable", self.info.detail if self.info else "",
                                len(status.ranks) if status else 0, 0, 0, outstanding_tokens, 0, 0,
                                status.restarts if status else 0, self.role)
        return ReplicaState(replica, "draining" if self.draining else status.state, status.detail, len(status.ranks),
                            status.running, status.queued, outstanding_tokens, status.kv_tokens_used,
                            status.kv_tokens_total, status.restarts, self.role)

    def trouble(self) -> UnavailableError | None:
        """Why it takes no requests; None when it does."""
        status = self.client.status
        if status is None or not self.client.alive:
            return UnavailableError(NOBODY)
        if status.state == "starting":
            return UnavailableError("The model is still being loaded; try again shortly.", code="model_loading")
        if status.state in ("failed", "draining"):
            what = "has failed" if status.state == "failed" else "is shutting down"
            detail = f": {status.detail}" if status.detail else ""
            return UnavailableError(f"The engine {what}{detail}", retry_after=10.0)
        return None


def why_none(members: Iterable[Member]) -> UnavailableError | None:
    """Why none of them takes requests; None when one does."""
    troubles = [one.trouble() for one in members if not one.draining]
    return None if None in troubles else next(iter(troubles), UnavailableError(NOBODY))
