"""Payloads that processes read from standard input when they start: ranks, apis, engines, node agents."""

from __future__ import annotations

from msgspec import Raw, Struct

from tandem.config.api_keys import ClientLimits
from tandem.protocol.keys import ClusterKeys
from tandem.protocol.layout import StageSpec

WORKER_MODULE = "tandem.executors.worker"
"""Module of the rank process, run with `python -m`."""
STANDBY = "standby"
"""Argument of `WORKER_MODULE` for a standby process, which waits to become a rank."""
LAUNCHERS = "tandem.launchers"
"""Entry point of the processes that launchers start; its first argument is a role."""
RANK_HOST = f"{LAUNCHERS} rank-host"
"""Arguments of `python -m` that start a node agent."""


class WorkerPayload(Struct, frozen=True, kw_only=True):
    """Payload of a rank."""

    spec: StageSpec
    keys: ClusterKeys
    bus_endpoint: str
    channel_host: str
    generation: str
    weights_endpoint: str = ""
    """Endpoint of the engine's machine that serves the weights; empty if the rank's machine has them."""
    lending: ClusterKeys | None = None
    """Keys for KV transfers between ranks that cache this model's KV on different disks; None without transfers."""
    lending_host: str = ""
    """Address of the rank's machine for KV transfers."""


class ApiPayload(Struct, frozen=True, kw_only=True):
    """Payload of an api process."""

    settings: Raw
    """Settings as `tandem.config.loading.to_json` writes them."""
    keys: dict[str, ClientLimits]
    """API keys and their limits, as the supervisor read them."""
    succeeds: bool = False
    """True for the successor of an api that serves: it accepts connections once it is ready."""


class EnginePayload(Struct, frozen=True, kw_only=True):
    """Payload of an engine process."""

    settings: Raw
    """Settings as `tandem.config.loading.to_json` writes them."""
    lending: ClusterKeys | None = None
    """Keys for KV transfers between the ranks of all engines of one model; None without transfers."""


class HostPayload(Struct, frozen=True, kw_only=True):
    """Payload of a node agent."""

    keys: ClusterKeys
    endpoints: list[str]
    """HOST:PORT of the head's join socket, for each address of the head."""
    slot: int | None = None
    ticket: str = ""
    address: str | None = None
    """Address of the machine for other ranks; None for the local address of the connection to the head."""
    join_timeout: float = 30.0
    """Seconds to retry joining."""
    rejoin: bool = False
    """True to join again after the head is lost."""
    log_level: str = "INFO"
    log_format: str = "auto"
    worker: str = WORKER_MODULE
    """Module that the node agent runs as a rank process."""


# --- engine <-> Ray driver, the only process that uses Ray: JSON lines on its standard input and output


class PlaceRanks(Struct, frozen=True, tag=True):
    """Reserve a device for each rank and start node agents there; answered by `Placed` or `ClusterRefused`.

    The driver first ends node agents of an earlier placement and releases their devices.
    """

    number: int
    """Number of this placement; its messages carry it."""
    payloads: list[HostPayload]
    """Payload of each rank's node agent; the driver adds the node's address."""
    avoid: list[str]
    """Ids of nodes whose host was lost: used only if no other node has a free device."""
    patience_s: float
    """Seconds to wait for free devices."""


class Connected(Struct, frozen=True, tag=True):
    """First message of the driver, once connected to Ray."""

    cluster: str
    """Address of the Ray head node, as host:port."""
    here: str
    """Address that the Ray node on this machine advertises."""


class Placed(Struct, frozen=True, tag=True):
    """Node agents are starting on these nodes, in rank order."""

    nodes: list[str]
    """Ray ids of the nodes."""
    places: list[str]
    """Address and name of each node, for messages."""


class ClusterRefused(Struct, frozen=True, tag=True):
    """The request fails until the user fixes the cause, such as a shortage of devices."""

    message: str


class HostOutput(Struct, frozen=True, tag=True):
    """Output line of a node agent or its rank."""

    placement: int
    rank: int
    place: str
    """Address and name of the node."""
    line: str


class HostEnded(Struct, frozen=True, tag=True):
    """A node agent has exited."""

    placement: int
    rank: int
    reason: str


DriverMessage = Connected | Placed | ClusterRefused | HostOutput | HostEnded
