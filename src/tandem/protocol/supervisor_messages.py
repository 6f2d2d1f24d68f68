"""Messages on the control socket of `tandem serve`: requests of the api and `tandem replica`, and the supervisor's replies."""

from __future__ import annotations

from msgspec import Struct

from tandem.config.settings import Role
from tandem.protocol.events import Event


class ListReplicas(Struct, frozen=True, tag=True):
    """Ask for `ReplicaList`. Also the api's heartbeat."""

    api: int = 0
    """Process id of the asking api; 0 for other clients."""
    reached: int = 0
    """Number of connected engines that accept requests."""
    events_after: int = 0
    """Number of the last event already received; later ones are sent."""
    number: int = 0
    """Number of the query, copied into `ReplicaList.number`."""


class AddReplica(Struct, frozen=True, tag=True):
    """Start another engine with the same settings; answered by `Done` before it has loaded."""

    role: Role = "both"


class DrainReplica(Struct, frozen=True, tag=True):
    """Drain an engine: send no new requests, and end it once idle; answered by `Done`."""

    replica: int


class RollingRestart(Struct, frozen=True, tag=True):
    """Replace the api and then the engines one at a time; answered by `Done` before it is over."""

    settings: bytes
    """Settings of the new processes, as `tandem.config.loading.to_json` writes them."""


class LoadModel(Struct, frozen=True, tag=True):
    """Start the engines of a model; answered by `Done` before they have loaded. Only the api checks whether it fits beside
    loaded models."""

    model: str


class UnloadModel(Struct, frozen=True, tag=True):
    """End the engines of a model once idle; answered by `Done`."""

    model: str


class NoteEvent(Struct, frozen=True, tag=True):
    """Add an event of the api to the history; answered by `Done`."""

    event: Event


SupervisorRequest = ListReplicas | AddReplica | DrainReplica | RollingRestart | LoadModel | UnloadModel | NoteEvent


class ReplicaInfo(Struct, frozen=True):
    """One engine as its supervisor sees it."""

    replica: int
    """Number of the replica, kept across restarts and never reused."""
    endpoint: str
    """ZeroMQ address of its socket for apis."""
    state: str
    """`running` (the process runs), `draining`, `restarting` (the process died and is being replaced), or `failed` (it died
    too often; retried at long intervals)."""
    pid: int | None
    """Process id of the engine; None if it does not run."""
    restarts: int
    """Number of times its process was replaced."""
    model: str = ""
    """Served model; empty if the server has one model."""
    detail: str = ""
    """Reason why its process does not run, and the next action."""
    role: Role = "both"
    """Phases of a request that it serves: prefill, decode or both."""


class ModelInfo(Struct, frozen=True):
    """One of several models as the supervisor sees it."""

    model: str
    """Served name."""
    state: str
    """`unloaded`, `running` (engines loading or loaded), `unloading`, or `failed`."""
    detail: str
    """Reason of the failure."""
    needs: dict[str, int]
    """Bytes needed on each machine by the memory plan; empty without a plan."""
    max_context: int
    keep: bool
    """True if the model is never unloaded."""
    unload_after: float | None
    """Idle seconds after which it is unloaded; None for never."""


class ReplicaList(Struct, frozen=True, tag=True):
    """All replicas, in the order of their numbers."""

    replicas: list[ReplicaInfo]
    models: list[ModelInfo] = []
    """All models if there are several; the first is `default`."""
    budget: dict[str, int] = {}
    """Bytes that all models together may use on each machine."""
    over: str = ""
    """Reason why the server shuts down, so no engine returns; empty while it runs."""
    announced: bool = True
    """True once the server has reported ready, as its api has seen every engine."""
    events: list[Event] = []
    """Events after `events_after`, oldest first."""
    rolling: bool = False
    """True during a rolling restart: requests wait for a replica instead of being refused."""
    build: str = ""
    """Version and digest of the supervisor's code."""
    number: int = 0
    """Number of the answered `ListReplicas`: commands sent before it have taken effect."""


class Done(Struct, frozen=True, tag="ReplicaChanged"):
    """The request is carried out, or has begun."""

    replica: int | None = None
    """Number of the added or draining replica."""
    model: str = ""
    """Name of the loaded or unloaded model."""


class ControlRefused(Struct, frozen=True, tag=True):
    """Refusal of a request; `message` is the reason in one line."""

    message: str


SupervisorReply = ReplicaList | Done | ControlRefused
