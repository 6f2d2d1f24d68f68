"""Messages between an engine and its Ray driver, the process that alone speaks to Ray: lines of JSON on its standard
input and output."""

from __future__ import annotations

from msgspec import Struct

from tandem.protocol.payloads import HostPayload


class PlaceRanks(Struct, frozen=True, tag=True):
    """Reserve a device for each rank and start node agents there; answered by `Placed` or `ClusterRefused`.

    What an earlier one reserved and started is ended first.
    """

    number: int
    """Number that tells this placement's messages from an earlier one's."""
    payloads: list[HostPayload]
    """For each rank what its node agent is started with; the driver adds the node's address."""
    avoid: list[str]
    """Nodes whose host was lost: taken only when no other has room."""
    patience_s: float
    """Seconds that may pass until there is room."""


class Connected(Struct, frozen=True, tag=True):
    """The driver's first words, when it is connected."""

    cluster: str
    """Address of the cluster's head, as host:port."""
    here: str
    """Address that the node on this machine advertises."""


class Placed(Struct, frozen=True, tag=True):
    """Rank hosts are being started on these nodes, in the order of ranks."""

    nodes: list[str]
    """Ids of the nodes."""
    places: list[str]
    """Address and name of each, for messages."""


class ClusterRefused(Struct, frozen=True, tag=True):
    """A request that cannot be met until the user mends something, such as a shortage of devices."""

    message: str


class HostOutput(Struct, frozen=True, tag=True):
    """A line that a node agent or its rank wrote."""

    placement: int
    rank: int
    place: str
    """Address and name of its node."""
    line: str


class HostEnded(Struct, frozen=True, tag=True):
    """A node agent has ended."""

    placement: int
    rank: int
    reason: str


DriverMessage = Connected | Placed | ClusterRefused | HostOutput | HostEnded
