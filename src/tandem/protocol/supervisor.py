"""Messages on the control socket of `tandem serve`: its api and `tandem replica` ask, the supervisor answers."""

from __future__ import annotations

from msgspec import Struct


class ListReplicas(Struct, frozen=True, tag=True):
    """Ask for `ReplicaList`. Also the api's heartbeat."""

    api: int = 0
    """Process id of the api that asks; 0 for anybody else."""
    reached: int = 0
    """Engines that it is connected to and that take requests."""


class AddReplica(Struct, frozen=True, tag=True):
    """Start one more engine with the settings of the others; answered by `ReplicaChanged` before it has loaded."""


class DrainReplica(Struct, frozen=True, tag=True):
    """Send an engine nothing new, and end it when it has nothing left to do; answered by `ReplicaChanged`."""

    replica: int


SupervisorRequest = ListReplicas | AddReplica | DrainReplica


class ReplicaInfo(Struct, frozen=True):
    """One engine as its supervisor sees it."""

    replica: int
    """Number that it keeps for life, also when it is started again; never given to another."""
    endpoint: str
    """zmq address of its socket for apis."""
    state: str
    """`running` (its process is), `draining`, or `restarting` (its process has died and is to be replaced)."""
    pid: int | None
    """Of its engine process."""
    restarts: int
    """Times that its process was replaced."""


class ReplicaList(Struct, frozen=True, tag=True):
    """All replicas, in the order of their numbers."""

    replicas: list[ReplicaInfo]


class ReplicaChanged(Struct, frozen=True, tag=True):
    """Done, or begun."""

    replica: int


class ControlRefused(Struct, frozen=True, tag=True):
    """It cannot be done; `message` says why, in one line."""

    message: str


SupervisorReply = ReplicaList | ReplicaChanged | ControlRefused
