"""Choice of Ray nodes for a replica's ranks. Pure."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Sequence

from msgspec import Struct

from tandem.errors import UsageError

UNIT = "mlx"
"""Custom Ray resource; a node has one unit per device for ranks."""
_APPLE_GPU = re.compile(r"accelerator_type:M\d+(-(Pro|Max|Ultra))?")
"""Resource that Ray adds on Apple silicon, besides `GPU`."""


class RayNode(Struct, frozen=True):
    """A node of a Ray cluster."""

    node_id: str
    address: str
    """Advertised address, to which other ranks connect."""
    host: str
    total: dict[str, float]
    """All resources of the node, by name."""
    free: dict[str, float]
    """Unused amounts of the resources."""
    trouble: str = ""
    """Why the node cannot be used; empty if it can."""

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one rank on this node; empty if the node cannot run ranks.

        If `mlx` and `GPU` describe the same devices, a rank takes one of each. Otherwise another job could get the device.
        """
        gpu = {"GPU": 1.0} if self.total.get("GPU", 0) else {}
        if self.total.get(UNIT, 0):
            return {UNIT: 1.0, **gpu}
        return gpu if any(_APPLE_GPU.fullmatch(name) for name in self.total) else {}

    def units(self, amounts: dict[str, float]) -> int:
        """Return the number of ranks for which the resource `amounts` suffice."""
        return min((int(amounts.get(name, 0.0)) for name in self.bundle), default=0)

    @property
    def where(self) -> str:
        """Address and hostname, for messages."""
        return f"{self.address} ({self.host})" if self.host not in ("", self.address) else self.address

    def describe(self) -> str:
        """Return address, hostname and resources for ranks, as text."""
        if self.trouble:
            return f"{self.where}: {self.trouble}"
        if not self.bundle:
            gpus = ", its GPUs count on Apple silicon only" if self.total.get("GPU", 0) else ""
            return f"{self.where}: no `{UNIT}` resource{gpus}"
        counts = " ".join(f"{name} {self.total[name]:g}" for name in self.bundle)
        return f"{self.where}: {counts}, room for {self.units(self.free)} of {self.units(self.total)} rank(s)"


class NodeList(Struct, frozen=True):
    """Nodes of a cluster, as seen from one of its machines."""

    nodes: list[RayNode]
    here: str
    """Advertised address of that machine's node."""


def choose(nodes: Sequence[RayNode], count: int, here: str, avoid: Collection[str] = ()) -> list[RayNode] | None:
    """Choose a node for each of `count` ranks, ordered by rank; None if there is too little room.

    Nodes with most room are filled first, which keeps a replica together and puts the next one elsewhere. Ranks follow their
    nodes' addresses, those on the engine's node (`here`) first. So machines numbered along a chain of cables are used in that
    order. Nodes with ids in `avoid` are used last.
    """
    room = sorted(
        (node for node in nodes if not node.trouble and node.units(node.free)),
        key=lambda node: (node.node_id in avoid, -node.units(node.free), _order(node, here)),
    )
    chosen = [node for node in room for _ in range(node.units(node.free))][:count]
    return sorted(chosen, key=lambda node: _order(node, here)) if len(chosen) == count else None


def check_addresses(nodes: Sequence[RayNode], here: str) -> None:
    """Raise UsageError if ranks or the engine would use another machine's loopback address."""
    remote = [node for node in nodes if not is_loopback(node.address)]
    local = [node for node in nodes if is_loopback(node.address)]
    if local and (remote or not is_loopback(here)):
        raise UsageError(
            f"Ray node {local[0].where} advertises a loopback address, while "
            f"{f'node {remote[0].where}' if remote else f'the engine is at {here} and'} does not; they cannot reach "
            "one another so. Start Ray on each machine with --node-ip-address=ADDRESS, the address that the others "
            "reach it at"
        )
    if remote and is_loopback(here):
        raise UsageError(
            f"the Ray node that the engine runs on advertises the loopback address {here}, while node "
            f"{remote[0].where} does not; start Ray here with --node-ip-address=ADDRESS, the address that "
            "the others reach this machine at"
        )


def shortage(nodes: Sequence[RayNode], count: int, cluster: str) -> str:
    """Return an error message for `count` ranks without room: the cluster's resources, and the remedy."""
    total = sum(node.units(node.total) for node in nodes if not node.trouble)
    free = sum(node.units(node.free) for node in nodes if not node.trouble)
    listed = "; ".join(node.describe() for node in nodes) or "no node"
    if total >= count:
        remedy = "end what else uses them, or use fewer ranks"
    else:
        remedy = (
            "on a machine that is to carry a rank run `ray start "
            f"--address={cluster} --node-ip-address=ADDRESS --resources='{{\"{UNIT}\": 1}}'`"
        )
    return (
        f"{count} rank(s) need a device each, the Ray cluster at {cluster} has {total}, {free} of them free: "
        f"{listed}. Remedy: {remedy}"
    )


def _order(node: RayNode, here: str) -> tuple[bool, int, int | str, str]:
    try:
        address = ipaddress.ip_address(node.address)
        return (node.address != here, address.version, int(address), node.node_id)
    except ValueError:
        return (node.address != here, 9, node.address, node.node_id)


def is_loopback(address: str) -> bool:
    """True for loopback addresses and `localhost`."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
