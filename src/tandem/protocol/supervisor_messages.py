"""Messages on the control socket of `tandem serve`: its api and `tandem replica` ask, the supervisor answers."""

from __future__ import annotations

from msgspec import Struct

from tandem.config.settings import Role
from tandem.protocol.events import Event


class ListReplicas(Struct, frozen=True, tag=True):
    """Ask for `ReplicaList`. Also the api's heartbeat."""

    api: int = 0
    """Process id of the api that asks; 0 for anybody else."""
    reached: int = 0
    """Engines that it is connected to and that take requests."""
    events_after: int = 0
    """Number of the last event that the asker has; later ones are sent."""
    number: int = 0
    """Comes back with the answer."""


class AddReplica(Struct, frozen=True, tag=True):
    """Start one more engine with the settings of the others; answered by `Done` before it has loaded."""

    role: Role = "both"


class DrainReplica(Struct, frozen=True, tag=True):
    """Send an engine nothing new, and end it when it has nothing left to do; answered by `Done`."""

    replica: int


class LoadModel(Struct, frozen=True, tag=True):
    """Start the engines of a model; answered by `Done` before they have loaded. Whether it fits beside the
    others is for the api to know, which decides alone."""

    model: str


class UnloadModel(Struct, frozen=True, tag=True):
    """End the engines of a model when they have nothing left to do; answered by `Done`."""

    model: str


class NoteEvent(Struct, frozen=True, tag=True):
    """The api has something for the history; answered by `Done`."""

    event: Event


SupervisorRequest = ListReplicas | AddReplica | DrainReplica | LoadModel | UnloadModel | NoteEvent


class ReplicaInfo(Struct, frozen=True):
    """One engine as its supervisor sees it."""

    replica: int
    """Number that it keeps for life, also when it is started again; never given to another."""
    endpoint: str
    """zmq address of its socket for apis."""
    state: str
    """`running` (its process is), `draining`, `restarting` (its process has died and is to be replaced), or `failed`
    (it did so too often, and is tried again at long intervals)."""
    pid: int | None
    """Process id of the engine; None if it does not run."""
    restarts: int
    """Times that its process was replaced."""
    model: str = ""
    """Which of several models it serves; empty where there is one."""
    detail: str = ""
    """Why its process does not run, and what follows."""
    role: Role = "both"
    """Part of a request that it takes."""


class ModelInfo(Struct, frozen=True):
    """One of several models as the supervisor sees it."""

    model: str
    """Served name."""
    state: str
    """`unloaded`, `running` (its engines are: they load, or have loaded), `unloading`, or `failed`."""
    detail: str
    """Why it failed."""
    needs: dict[str, int]
    """Bytes that it takes on each machine by the memory plan; empty where there is no plan."""
    max_context: int
    keep: bool
    """True if the model is never unloaded."""
    unload_after: float | None
    """Seconds without a request after which it is unloaded; None for never."""


class ReplicaList(Struct, frozen=True, tag=True):
    """All replicas, in the order of their numbers."""

    replicas: list[ReplicaInfo]
    models: list[ModelInfo] = []
    """Where there are several: all of them, the first is the one called `default`."""
    budget: dict[str, int] = {}
    """Bytes that models may take together on each machine."""
    over: str = ""
    """Why the server ends, and no engine will come back; empty while it does not."""
    announced: bool = True
    """The server has said that it is ready: its api has heard of every engine."""
    events: list[Event] = []
    """What happened since the event that was named, oldest first."""
    number: int = 0
    """Number of the `ListReplicas` that this answers: commands that were sent before it have had their effect."""


class Done(Struct, frozen=True, tag="ReplicaChanged"):
    """Done, or begun."""

    replica: int | None = None
    """The one that was added or is drained."""
    model: str = ""
    """The one that is loaded or unloaded."""


class ControlRefused(Struct, frozen=True, tag=True):
    """Refuse a request; `message` has the reason, in one line."""

    message: str


SupervisorReply = ReplicaList | Done | ControlRefused
