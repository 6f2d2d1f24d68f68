"""Messages between an engine and its Ray driver, the only process that uses Ray: JSON lines on its standard input and output."""

from __future__ import annotations

from msgspec import Struct

from tandem.protocol.payloads import HostPayload


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
